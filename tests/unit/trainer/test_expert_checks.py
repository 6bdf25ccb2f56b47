"""Settings for models with experts: settings that the model or the engine does not support are errors before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyreme.config.model import ModelConfig
from polyreme.config.run import RunConfig
from polyreme.config.trainer import LoraConfig, RunMoeConfig
from polyreme.errors import ConfigError
from polyreme_rollout.replica import check_routes
from polyreme_rollout.testing.simulated_engine import SimulatedInferenceEngine
from polyreme_trainer.checks import check_experts
from support.configs import GLM4_MOE, LLAMA, MIXTRAL, run_config


def config(folder: Path, fields: dict[str, Any], engine: str = "vllm", **moe: Any) -> RunConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    base = run_config(folder, model=ModelConfig(path=folder))
    trainer = base.trainer.model_copy(update={"moe": RunMoeConfig.model_validate(moe)})
    return base.model_copy(update={"trainer": trainer, "rollout": base.rollout.model_copy(update={"engine": engine})})


@pytest.mark.parametrize(
    ("fields", "engine", "moe", "found"),
    [
        (LLAMA, "vllm", {}, None),
        (LLAMA, "vllm", {"aux_loss_coef": 0.0}, None),
        (LLAMA, "vllm", {"aux_loss_coef": 0.1}, "dense"),
        (LLAMA, "vllm", {"z_loss_coef": 0.1}, "dense"),
        (LLAMA, "mine", {"replay_routes": True}, "dense"),
        (MIXTRAL, "vllm", {"aux_loss_coef": 0.1, "z_loss_coef": 0.1}, None),
        (MIXTRAL, "mine", {"replay_routes": True}, None),
        (MIXTRAL, "vllm", {"replay_routes": True}, "rollout.engine: vllm"),
        (LLAMA, "vllm", {"bias_update_rate": 0.1}, "dense"),
        (MIXTRAL, "vllm", {"bias_update_rate": 0.1}, "mixtral, which has none"),
        (MIXTRAL, "vllm", {"bias_update_rate": 0.0}, None),
        (GLM4_MOE, "vllm", {"bias_update_rate": 0.1, "aux_loss_coef": 0.1}, None),
    ],
)
def test_what_the_model_or_the_engine_lacks_is_an_error(
    fields: dict[str, Any], engine: str, moe: dict[str, Any], found: str | None, tmp_path: Path
) -> None:
    errors = list(check_experts(config(tmp_path, fields, engine, **moe)))
    assert [error.found for error in errors if isinstance(error, ConfigError)] == ([] if found is None else [errors[0].found])
    assert found is None or found in errors[0].found


def test_adapters_freeze_the_expert_biases(tmp_path: Path) -> None:
    whole = config(tmp_path, GLM4_MOE, bias_update_rate=0.1)
    adapted = whole.model_copy(update={"trainer": whole.trainer.model_copy(update={"lora": LoraConfig(rank=2)})})
    [error] = check_experts(adapted)
    assert isinstance(error, ConfigError) and "trainer.lora" in error.expected


@pytest.mark.parametrize(
    ("device", "placement", "fields", "errors"),
    [
        ("npu", "colocated", MIXTRAL, 1),
        ("npu", "colocated", LLAMA, 0),
        ("npu", "separate", MIXTRAL, 0),
        ("cuda", "colocated", MIXTRAL, 0),
    ],
)
def test_experts_do_not_share_an_npu_with_the_learner(
    device: str, placement: str, fields: dict[str, Any], errors: int, tmp_path: Path
) -> None:
    changed = config(tmp_path, fields).model_copy(update={"device": device, "placement": placement})
    assert ["npu" in str(error) for error in check_experts(changed)] == [True] * errors


def test_a_replica_whose_engine_reports_no_routes_does_not_start_in_a_run_that_replays_them(tmp_path: Path) -> None:
    silent, reporting = (SimulatedInferenceEngine(frozenset("w"), 8, 8, route_bytes=each) for each in (0, 4))
    replaying = config(tmp_path, MIXTRAL, "mine", replay_routes=True)
    check_routes(silent, config(tmp_path, MIXTRAL, "mine"))
    check_routes(reporting, replaying)
    with pytest.raises(ConfigError) as caught:
        check_routes(silent, replaying)
    assert caught.value.found.startswith("simulated")
