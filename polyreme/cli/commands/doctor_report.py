"""The file of `polyreme doctor --report`: what somebody else needs to understand a failure.

Invariant: the file has no secret that this process knows: values of secret variables of the environment, the password of the run's Redis,
and of an address nothing but scheme, host and port. Samples, data and answers are not read.
"""

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path

from polyreme.rundir.log_lines import log_files, newest_attempt

LINES_OF_A_LOG = 60
_PACKAGES = re.compile(
    r"(polyreme|torch|vllm|megatron|mindspeed|transformers|tokenizers|numpy|grpcio|protobuf|redis|valkey|pydantic|flash|triton)"
)
_SECRET = re.compile(r"(TOKEN|PASSWORD|SECRET|CREDENTIAL|_KEY$)")
_SHORTEST_SECRET = 4
"""Characters. A shorter value, such as `1`, would be replaced everywhere."""
_ADDRESS = re.compile(r"\b(\w+)://(?:[^\s/@'\"]*@)?([^\s/'\"]+)(/[^\s'\"]*)?")


def report_text(verdicts: Sequence[str], run_dir: Path | None, environment: Mapping[str, str]) -> str:
    """Returns the text of the report.

    Args:
        verdicts: the lines of `polyreme doctor`.
        run_dir: the run whose configuration and logs are included, or None.
        environment: of this process; its names that begin with POLYREME_ are listed, without values.
    """
    parts = [
        ("system", [platform.platform(), f"Python {platform.python_version()}"]),
        ("packages", packages()),
        ("variables", sorted(name for name in environment if name.startswith("POLYREME_"))),
        ("doctor", verdicts),
    ]
    if run_dir is not None:
        parts += list(_of_run(run_dir))
    text = "\n".join(f"== {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in parts)
    return without_secrets(text, secrets_in(run_dir, environment))


def packages() -> list[str]:
    """The installed packages that computations and services depend on, with their versions."""
    found = {f"{found.name} {found.version}" for found in distributions() if _PACKAGES.match(found.name.lower())}
    return sorted(found)


def secrets_in(run_dir: Path | None, environment: Mapping[str, str]) -> list[str]:
    """The secrets that this process can know, longest first."""
    known = [value for name, value in environment.items() if _SECRET.search(name.upper())]
    password = run_dir / "redis" / "password" if run_dir is not None else None
    if password is not None and password.is_file():
        known.append(password.read_text().strip())
    return sorted((value for value in known if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)


def without_secrets(text: str, secrets: Sequence[str]) -> str:
    """The text without the secrets, and with addresses cut to scheme, host and port: a webhook's path is a secret."""
    for secret in secrets:
        text = text.replace(secret, "(removed)")
    return _ADDRESS.sub(lambda match: f"{match[1]}://{match[2]}" + ("/(removed)" if len(match[3] or "") > 1 else ""), text)


def _of_run(run_dir: Path) -> Iterator[tuple[str, Sequence[str]]]:
    for name in ("config.yaml", "summary.json"):
        path = run_dir / name
        yield name, path.read_text().splitlines() if path.is_file() else [f"not in {run_dir}"]
    for file in log_files(newest_attempt(run_dir)):
        yield f"the last lines of {file.process}", [line.text for line in file.read()[-LINES_OF_A_LOG:]]
