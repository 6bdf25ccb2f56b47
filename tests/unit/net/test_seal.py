"""A process with a run's seal refuses another configuration, and other files, of that run."""

import pytest

from polyreme.errors import GateError
from polyreme.net.seal import SEAL, check_config, check_files, seal_of

CONFIG, FILES = b'{"reward": "math"}', {"config.json": b"{}", "tokenizer.json": b"[]"}


@pytest.fixture(autouse=True)
def sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEAL, seal_of("one", CONFIG, FILES))


def test_what_was_sealed_passes() -> None:
    check_config("one", CONFIG)
    check_files("one", FILES)


@pytest.mark.parametrize("config", [b"", b'{"reward": "theirs"}', CONFIG + b" "])
def test_another_configuration_is_refused(config: bytes) -> None:
    with pytest.raises(GateError) as caught:
        check_config("one", config)
    assert "configuration of run one" in caught.value.expected


@pytest.mark.parametrize(
    "files", [{}, {**FILES, "more.json": b""}, {**FILES, "config.json": b"{ }"}, {"config.json": b"{}t", "okenizer.json": b"[]"}]
)
def test_other_files_are_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(GateError):
        check_files("one", files)


def test_other_runs_and_processes_without_a_seal_trust_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    check_config("another", b"{}")
    monkeypatch.delenv(SEAL)
    check_config("one", b"{}")
    check_files("one", {})
