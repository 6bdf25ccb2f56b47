"""The sampler in a program's own process, and the models that one is given."""

import asyncio
import json
from pathlib import Path

import pytest

from polyreme.errors import DataError
from polyreme_rollout.engine.protocol import LoadError
from polyreme_rollout.local import LocalSampler
from polyreme_rollout.testing.simulated_engine import WEIGHT_NAMES, Failures, Lengths, SimulatedInferenceEngine
from support.configs import run_config
from support.simulated_service import SimulatedWeights


@pytest.mark.parametrize("prompt", [[], [5] * 16, [5] * 40, [50], [-1]])
def test_a_prompt_that_the_engine_cannot_continue_is_an_error(tmp_path: Path, prompt: list[int]) -> None:
    engine = SimulatedInferenceEngine(WEIGHT_NAMES, 16, 50, lengths=Lengths(1000.0))
    with asyncio.Runner() as runner:
        sampler = LocalSampler(engine, run_config(tmp_path), runner)
        [answer] = sampler.sample([[5] * 15], [])
        assert len(answer.ids) == 1
        with pytest.raises(DataError) as raised:
            sampler.sample([[5], prompt], [])
        assert "prompt 1" in raised.value.expected
    engine.close()


@pytest.mark.timeout(60)
def test_a_failed_load_leaves_no_policy_until_a_later_one(tmp_path: Path) -> None:
    weights = SimulatedWeights()
    engine = SimulatedInferenceEngine(WEIGHT_NAMES, 16, 50, failures=Failures(broken_loads=frozenset({2})))
    with asyncio.Runner() as runner:
        sampler = LocalSampler(engine, run_config(tmp_path), runner)
        sampler.load(weights.write(None))
        before = sampler.sample([[5]], [])
        with pytest.raises(LoadError):
            sampler.load(weights.write(None))
        with pytest.raises(LoadError, match="the last load has failed"):
            sampler.sample([[5]], [])
        sampler.load(weights.write(None))
        assert sampler.sample([[5]], []) == before
    engine.close()
    weights.close()


def test_a_damaged_model_is_an_error_that_the_sampler_survives(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    from polyreme_rollout.local.weights import SavedWeights

    base, saved = tmp_path / "base", tmp_path / "saved"
    for folder in (base, saved):
        folder.mkdir()
        save_file({"w": torch.ones(4, 4)}, folder / "model.safetensors")
    weights = SavedWeights(base, frozenset({"w"}), "float32")
    file = saved / "model.safetensors"
    weights.write(saved)
    whole = file.read_bytes()
    for content in (b"", whole[:20], whole[:-1]):
        file.write_bytes(content)
        with pytest.raises(OSError, match="damaged safetensors"):
            weights.write(saved)
    for text in ("", json.dumps({"r": 2})):
        (saved / "adapter_config.json").write_text(text)
        with pytest.raises((ValueError, KeyError, OSError)):
            weights.write(saved)
    weights.close()
