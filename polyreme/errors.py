"""Every error a user can meet, with what was expected, what was found and what to do.

The command line prints these as one message without a traceback and exits with their `exit_code`; any other exception is a bug
and keeps its traceback.
"""


class PolyremeError(Exception):
    """A failure that the user can act on.

    Args:
        expected: what the part needed, as a phrase.
        found: what it got instead.
        do: the next step for the user, as an imperative sentence.
    """

    exit_code = 1

    def __init__(self, expected: str, found: str, do: str) -> None:
        super().__init__(expected, found, do)
        self.expected, self.found, self.do = expected, found, do

    def __str__(self) -> str:
        if self.found.startswith("expected "):  # an error passed on: its own message is the whole of it
            return self.found
        return f"expected {self.expected}; found {self.found}. {self.do}"


class ConfigError(PolyremeError, ValueError):
    """The run's configuration, or what it names, cannot be used. Nothing was started."""

    exit_code = 2


class DataError(PolyremeError, ValueError):
    """A data set or prompt cannot be used."""

    exit_code = 2


class StoreError(PolyremeError, ConnectionError):
    """Redis cannot be reached or is not set up to keep what it is told."""

    exit_code = 3


class UnavailableError(PolyremeError, TimeoutError):
    """Something that had to be there did not come before its deadline."""

    exit_code = 4


class StaleTermError(PolyremeError, RuntimeError):
    """Another process has taken this role over; this one must stop and change nothing more."""

    exit_code = 5


class GateError(PolyremeError, RuntimeError):
    """Two parts that must agree (trainer, replica, Hugging Face model) do not: training would be wrong."""

    exit_code = 6


class RunFailedError(PolyremeError, RuntimeError):
    """The run was declared failed; the reason is in `found`."""

    exit_code = 7
