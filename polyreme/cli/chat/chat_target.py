"""The target of `polyreme chat`: a replica of a live run, a server at a URL, or a model directory that it serves itself.

Invariant: a server that this module starts has ended when its block ends.
"""

import asyncio
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.config.security import EndpointSecurity, SecurityConfig
from polyreme.config.stage import SftConfig, StageConfig
from polyreme.dataset.chat import read_chat
from polyreme.dataset.columns import value_at
from polyreme.dataset.source import read_objects
from polyreme.errors import ConfigError, DataError, UnavailableError
from polyreme.net.ports import free_port, join, loopback
from polyreme.process.lifecycle import OWNER_DIED, Child
from polyreme.rundir.model_export import export_config, is_classifier, no_policy
from polyreme.rundir.run_directory import no_run, read_run_file
from polyreme.rundir.run_status import directory_status

START_SECONDS = 600.0
"""Timeout in seconds for an engine to load a model."""
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 30.0
_ROWS = 100
"""Number of training rows whose system messages are read."""


@dataclass(frozen=True)
class ChatTarget:
    """A model to talk to.

    Attributes:
        title: name for display.
        url: URL of its /v1; '' for a directory that is not served yet.
        model_dir: that directory, or None.
        security: security settings of the server.
        version: version to request from a gateway at `url`; None: the server's model.
        system: system message of every conversation, or None.
        is_chat: whether the model has a chat template; otherwise it continues a text.
        max_tokens: maximum tokens of an answer, if the model's context has room for them.
    """

    title: str
    url: str = ""
    model_dir: Path | None = None
    security: SecurityConfig | EndpointSecurity | None = None
    version: int | None = None
    system: str | None = None
    is_chat: bool = True
    max_tokens: int = 512


def find_target(
    place: str, version: int | None = None, access: EndpointSecurity | None = None, system: str | None = None
) -> ChatTarget:
    """The target of a run directory, a Hugging Face directory, or a URL of a /v1.

    Args:
        place: the directory or URL.
        version: for a run directory, the export of this version instead of the live policy; for a URL, this version of a gateway.
        access: security settings of a URL. Those of a run are in its configuration.
        system: system message instead of the run's; '': none.

    Raises:
        ConfigError: there is no such model, or it is a reward model.
    """
    target = _found(place, version, access)
    return target if system is None else replace(target, system=system or None)


def _found(place: str, version: int | None, access: EndpointSecurity | None) -> ChatTarget:
    if place.startswith(("http://", "https://")):
        return ChatTarget(place if version is None else f"version {version}", url=place, security=access, version=version)
    path = Path(place)
    if read_run_file(path) is not None:
        return _of_run(path, version)
    if version is not None:
        raise ConfigError(f"a run directory at {path}, which has versions", "a model directory", "Pass the run directory.")
    if (path / "config.json").is_file():
        return _of_model(path)
    raise no_run(path, "a run directory, a Hugging Face directory or a URL at")


@contextmanager
def served(target: ChatTarget) -> Iterator[str]:
    """Yields the URL of the target's /v1. A rollout service serves a directory during the block.

    Raises:
        UnavailableError: the service did not start; the message has the end of its log.
    """
    if target.model_dir is None:
        yield target.url
        return
    port = free_port()
    words = (sys.executable, "-m", "polyreme", "rollout", "--model", str(target.model_dir), "--host", loopback())
    with tempfile.TemporaryDirectory() as folder:
        child = Child.spawn(
            "rollout", (*words, "--http-port", str(port)), None, Path(folder, "rollout.log"), death_signal=OWNER_DIED
        )
        try:
            scheme = "https" if target.security and target.security.certificate else "http"
            _wait_until_listening(child, port)
            yield f"{scheme}://{join(loopback(), port)}/v1"
        finally:
            asyncio.run(child.stop(_GRACE_SECONDS))


def _wait_until_listening(child: Child, port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((loopback(), port), 1.0):
            return
        time.sleep(_POLL_SECONDS)
    found = "it ended" if child.poll() is not None else f"it did not listen within {START_SECONDS:g} s"
    raise UnavailableError(
        "a rollout service that serves the model", f"{found}:\n{child.log_tail(10)}", "Fix the problem in its log."
    )


def _of_run(run_dir: Path, version: int | None) -> ChatTarget:
    found = read_run_file(run_dir)
    assert found is not None
    if version is not None:
        return _export(run_dir, run_dir / "hf" / f"iteration-{version:06d}")
    if found.replicas and not directory_status(run_dir).ended:
        url = next(iter(found.replicas.values()))
        return _as_trained("policy", load_config(run_dir / "config.yaml"), url=url)
    exports = sorted(path for path in run_dir.glob("hf/*") if (path / "config.json").is_file())
    if not exports:
        raise ConfigError(
            f"a live replica or an export of {run_dir}",
            "neither",
            "Wait for the first version of a run, or for the end of a stage.",
        )
    return _of_model(exports[-1])


def _export(run_dir: Path, model_dir: Path) -> ChatTarget:
    if not (model_dir / "config.json").is_file():
        there = ", ".join(sorted(path.name for path in run_dir.glob("hf/*"))) or "none"
        raise ConfigError(f"an export {model_dir.name} in {run_dir / 'hf'}", there, "Choose one of these.")
    return _of_model(model_dir)


def _of_model(model_dir: Path) -> ChatTarget:
    """A model directory, as its run or stage asks it if it is an export."""
    if is_classifier(_json_object(model_dir / "config.json")):
        raise no_policy(model_dir)
    config = export_config(model_dir)
    return (
        ChatTarget(model_dir.name, model_dir=model_dir)
        if config is None
        else _as_trained(model_dir.name, config, model_dir=model_dir)
    )


def _as_trained(title: str, config: RunConfig | StageConfig, url: str = "", model_dir: Path | None = None) -> ChatTarget:
    """A model asked as it was trained: its template, its system message, and for a run its answers' length and its security."""
    found = ChatTarget(
        title, url, model_dir, system=config.data.system or _system_of_rows(config), is_chat=config.data.template == "chat"
    )
    if isinstance(config, StageConfig):
        return found
    return replace(found, security=config.security, max_tokens=config.rollout.max_new_tokens)


def _system_of_rows(config: RunConfig | StageConfig) -> str | None:
    """The most frequent system message of the first training rows; None without one, or when the rows cannot be read any more."""
    keys = [config.data.prompt_key, *([config.data.messages_key] if isinstance(config, SftConfig) else [])]
    found = Counter[str | None]()
    with suppress(DataError):
        for row in islice(read_objects(config.data.train), _ROWS):
            texts = (_system_of(value_at(row.fields, key), row.where) for key in keys)
            found[next((text for text in texts if text is not None), None)] += 1
    return found.most_common(1)[0][0] if found else None


def _system_of(messages: object, where: str) -> str | None:
    """The system message of a row. Raises DataError for messages that no template takes."""
    if not isinstance(messages, list | tuple) or not all(isinstance(each, Mapping) for each in messages):
        return None
    first = read_chat(messages, where).messages[0]
    return str(first["content"]) if first["role"] == "system" else None


def _json_object(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"a JSON object in {path}", str(error), "Save the model with save_pretrained.") from None
