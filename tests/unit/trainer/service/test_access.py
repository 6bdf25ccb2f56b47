"""Who may start and reach a training service: what `polyreme serve` refuses before it starts anything."""

from pathlib import Path

import pytest

from polyreme.cli.main import build_app
from polyreme.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "serve.yaml").write_text(f"model: {{path: model}}\noutput_dir: {tmp_path}/out\nsampler: {{max_model_len: 64}}\n")
    return str(tmp_path / "serve.yaml")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["host=0.0.0.0"], "security.token_env"),
        (["host=10.0.0.1", "security.token_env=POLYREME_NO_SUCH_KEY"], "POLYREME_NO_SUCH_KEY"),
        (["--part=learner"], "--redis"),
    ],
)
def test_a_service_that_would_be_open_or_alone_is_refused(
    words: list[str], named: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POLYREME_REDIS", raising=False)
    command = ["serve", file, *words]
    with pytest.raises(ConfigError, match=named):
        build_app(command)(args=command, standalone_mode=False)
    assert not (tmp_path / "out").exists()


def test_a_sampler_needs_the_service_s_redis(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYREME_REDIS", raising=False)
    command = ["sampler", file]
    with pytest.raises(ConfigError, match="--redis"):
        build_app(command)(args=command, standalone_mode=False)
