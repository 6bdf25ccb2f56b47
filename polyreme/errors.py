"""Errors that a user can act on: what was expected, what was found, what to do.

Invariant: the command line prints such an error as one message without a traceback and exits with its `exit_code`. Every other
exception is a bug and keeps its traceback.
"""

from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


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
        if self.found.startswith("expected ") and "; found " in self.found:  # a forwarded error: its own message is complete
            return self.found
        return f"expected {self.expected}; found {self.found}. {self.do}"


class ConfigError(PolyremeError, ValueError):
    """The configuration, or a file that it names, cannot be used. Nothing was started."""

    exit_code = 2


class AbsentError(ConfigError):
    """A file or a device that the configuration names is not on this machine. A run on another machine may have it."""


class DataError(PolyremeError, ValueError):
    """A data set or prompt cannot be used."""

    exit_code = 2


class StoreError(PolyremeError, ConnectionError):
    """Redis cannot be reached, or its settings could lose data."""

    exit_code = 3


class UnavailableError(PolyremeError, TimeoutError):
    """Something required did not appear before its deadline."""

    exit_code = 4


class StaleTermError(PolyremeError, RuntimeError):
    """Another process has taken over this role. This process must stop."""

    exit_code = 5


class GateError(PolyremeError, RuntimeError):
    """Two parts that must agree (trainer, replica, Hugging Face model) do not: training would be wrong."""

    exit_code = 6


class RunFailedError(PolyremeError, RuntimeError):
    """The run was declared failed; the reason is in `found`."""

    exit_code = 7


def results(*checks: Iterator[T]) -> "Iterator[T | PolyremeError]":
    """What several checks yield, and the errors that they raise. An error ends only its own check."""
    for check in checks:
        try:
            yield from check
        except PolyremeError as error:
            yield error
