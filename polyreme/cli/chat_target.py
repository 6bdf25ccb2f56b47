"""The target of `polyreme chat`: a replica of a live run, a server at a URL, or a model directory that it serves itself.

Invariant: a server that this module starts has ended when its block ends.
"""

import asyncio
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polyreme.cli.run_directory import no_run, read_run_file, read_settings
from polyreme.cli.run_status import directory_status
from polyreme.config.load import load_config
from polyreme.config.security import EndpointSecurity, SecurityConfig
from polyreme.errors import ConfigError, UnavailableError
from polyreme.net.ports import free_port
from polyreme.process.lifecycle import OWNER_DIED, Child

START_SECONDS = 600.0
"""Timeout in seconds for an engine to load a model."""
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class ChatTarget:
    """A model to talk to.

    Attributes:
        title: name for display.
        url: URL of its /v1; '' for a directory that is not served yet.
        model_dir: that directory, or None.
        security: security settings of the server.
        version: version to request from a gateway at `url`; None: the server's model.
        system: system message, or None.
        is_chat: whether the model has a chat template; otherwise it continues a text.
        max_tokens: maximum tokens of an answer.
    """

    title: str
    url: str = ""
    model_dir: Path | None = None
    security: SecurityConfig | EndpointSecurity | None = None
    version: int | None = None
    system: str | None = None
    is_chat: bool = True
    max_tokens: int = 512


def find_target(place: str, version: int | None = None, access: EndpointSecurity | None = None) -> ChatTarget:
    """The target of a run directory, a Hugging Face directory, or a URL of a /v1.

    Args:
        place: the directory or URL.
        version: for a run directory, the export of this version instead of the live policy; for a URL, this version of a gateway.
        access: security settings of a URL. Those of a run are in its configuration.

    Raises:
        ConfigError: there is no such model.
    """
    if place.startswith(("http://", "https://")):
        return ChatTarget(place if version is None else f"version {version}", url=place, security=access, version=version)
    path = Path(place)
    if read_run_file(path) is not None:
        return _of_run(path, version)
    if version is not None:
        raise ConfigError(f"a run directory at {path}, which has versions", "a model directory", "Pass the run directory.")
    if (path / "config.json").is_file():
        run_dir = path.resolve().parent.parent
        is_export = path.resolve().parent.name == "hf" and (run_dir / "config.yaml").is_file()
        return _export(run_dir, path) if is_export else ChatTarget(path.name, model_dir=path)
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
    words = (sys.executable, "-m", "polyreme", "rollout", "--model", str(target.model_dir), "--host", "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        child = Child.spawn(
            "rollout", (*words, "--http-port", str(port)), None, Path(folder, "rollout.log"), death_signal=OWNER_DIED
        )
        try:
            scheme = "https" if target.security and target.security.certificate else "http"
            _wait_until_listening(child, port)
            yield f"{scheme}://127.0.0.1:{port}/v1"
        finally:
            asyncio.run(child.stop(_GRACE_SECONDS))


def _wait_until_listening(child: Child, port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while child.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
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
        config = load_config(run_dir / "config.yaml")
        url = next(iter(found.replicas.values()))
        chat = config.data.template == "chat"
        return ChatTarget("policy", url, None, config.security, None, config.data.system, chat, config.rollout.max_new_tokens)
    exports = sorted(path for path in run_dir.glob("hf/*") if (path / "config.json").is_file())
    if not exports:
        raise ConfigError(f"a live replica or an export of {run_dir}", "neither", "Wait until the run serves its first version.")
    return _export(run_dir, exports[-1])


def _export(run_dir: Path, model_dir: Path) -> ChatTarget:
    if not (model_dir / "config.json").is_file():
        there = ", ".join(sorted(path.name for path in run_dir.glob("hf/*"))) or "none"
        raise ConfigError(f"an export {model_dir.name} in {run_dir / 'hf'}", there, "Choose one of these.")
    if "stage" in read_settings(run_dir):
        return ChatTarget(model_dir.name, model_dir=model_dir)
    config = load_config(run_dir / "config.yaml")
    chat = config.data.template == "chat"
    return ChatTarget(
        model_dir.name, "", model_dir, config.security, None, config.data.system, chat, config.rollout.max_new_tokens
    )
