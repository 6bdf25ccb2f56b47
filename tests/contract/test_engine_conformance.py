"""Every inference engine conforms to `polyreme_rollout.engine.protocol`: see tests/support/engine_conformance.py."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from polyreme.errors import ConfigError
from polyreme_rollout.engine.load import load_engine
from support.engine_conformance import CHECKS, CLOSES
from support.models import tiny_model
from support.replicas import model_files
from support.tiny_tokenizer import model_files as tokenizer_files

TESTS = Path(__file__).resolve().parents[1]
SECONDS = 840.0
"""For all checks of an engine: less than the limit of a test, and ten times what they need on a machine that has nothing else to do."""


OPTIONS: dict[str, dict[str, Any]] = {
    "vllm-adapters": {"max_loras": 2, "max_lora_rank": 8},
    "vllm-no-prefix-caching": {"prefix_caching": False},
    "vllm-chunked-prefill": {"chunked_prefill": True, "max_num_batched_tokens": 16},  # half of a check's prompt, or less
}
"""Options of rollout.vllm, none of which affects conformance."""


@pytest.fixture(
    scope="module",
    params=[
        "simulated",
        "transformers",
        pytest.param("vllm", marks=pytest.mark.real),
        *(pytest.param(name, marks=[pytest.mark.real, pytest.mark.slow]) for name in OPTIONS),
    ],
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The results of all checks of one engine, which runs once in its own process, since it may fork."""
    folder = tmp_path_factory.mktemp("engine")
    (files := folder / "files").mkdir()
    weights: list[str] = []
    contents = tokenizer_files()
    engine, options = request.param.partition("-")[0], OPTIONS.get(request.param, {})
    if engine != "simulated":
        model = tiny_model("tied", folder / "model", hidden_size=128)
        contents, weights = model_files(model), [str(model)]
    for name, data in contents.items():
        (files / name).write_bytes(data)
    command = [sys.executable, "-m", "support.engine_conformance", engine, str(files), json.dumps(options), *weights]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    status: int | None = None
    with open(folder / "stdout", "wb") as stdout, open(folder / "stderr", "wb") as stderr, suppress(subprocess.TimeoutExpired):
        status = subprocess.run(command, env=environment, stdout=stdout, stderr=stderr, timeout=SECONDS, check=False).returncode
    lines = [line for line in (folder / "stdout").read_text().splitlines() if line.startswith("{")]
    found = {check: problem for line in lines for check, problem in json.loads(line).items()}
    missing = f"expected a result within {SECONDS:.0f} s; found status {status}: {(folder / 'stderr').read_text()[-4000:]}"
    return dict.fromkeys([*CHECKS, CLOSES], missing) | found | ({} if status == 0 else {CLOSES: missing})


@pytest.mark.parametrize("check", [*CHECKS, CLOSES])
def test_engine(results: dict[str, str | None], check: str) -> None:
    assert results[check] is None, results[check]


def test_an_unknown_engine_is_an_error_that_names_the_installed_ones() -> None:
    with pytest.raises(ConfigError) as raised:
        load_engine("vlm")
    assert "simulated, transformers, vllm" in raised.value.expected
    assert "'vlm'" in raised.value.found
