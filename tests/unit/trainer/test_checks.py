"""The trainer's checks of a run's models, trackers and notices."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from polyreme.config.model import ModelConfig
from polyreme.config.notices import CommandConfig, ReceiverConfig, WebhookConfig
from polyreme.config.trackers import WandbConfig
from polyreme.errors import ConfigError
from polyreme_trainer import checks
from polyreme_trainer.checks import _check_engine, _check_notices, _check_reader, check
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from support.configs import MIXTRAL, run_config
from support.models import tiny_family_model, tiny_model


@pytest.mark.parametrize(
    ("sizes", "found"), [({}, 0), ({"vocab_size": 44}, 1), ({"max_position_embeddings": 63}, 1), ({"vocab_size": 60}, 0)]
)
def test_a_critic_reads_every_token_and_position_of_the_actor(sizes: dict[str, Any], found: int, tmp_path: Path) -> None:
    actor, critic = tiny_model("tied", tmp_path / "actor"), tiny_family_model("qwen2", tmp_path / "critic", **sizes)
    assert len(list(_check_reader("critic", critic, actor, 64))) == found


def test_a_learner_that_cannot_fit_the_machine_is_an_error(tmp_path: Path) -> None:
    config = run_config(tmp_path, model=ModelConfig(path=tiny_model("tied", tmp_path / "actor")))
    sizes = config.model.path / "config.json"
    sizes.write_text(json.dumps(json.loads(sizes.read_text()) | {"vocab_size": 2**44}))  # more than any machine has bytes
    found = next(check(config))
    assert isinstance(found, ConfigError) and "actor weights" in found.found


def test_a_machine_with_few_cards_is_advised_on_the_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def one(kind: str) -> int:
        asked.append(kind)
        return 1

    monkeypatch.setattr(checks, "device_count", one)
    config = run_config(tmp_path, device="cuda")  # one learner rank and one replica; its model does not exist
    assert "placement: colocated" in next(found for found in check(config) if isinstance(found, str))
    assert asked == ["cuda"]


def test_a_tracker_without_its_package_is_an_error_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # cannot be imported
    model = ModelConfig(path=tiny_model("tied", tmp_path / "actor"))
    config = run_config(tmp_path, model=model, trackers=[WandbConfig(kind="wandb")])
    found = next(check(config))
    assert isinstance(found, ConfigError)
    assert "pip install wandb" in found.do


def test_a_receiver_of_notices_that_cannot_be_reached_is_an_error() -> None:
    missing = CommandConfig(command=["no-such-program"])
    unset = WebhookConfig(url="https://example.org/hook", token_env="POLYREME_TEST_NO_TOKEN")
    fine: list[ReceiverConfig] = [CommandConfig(command=["sh"]), WebhookConfig(url="http://127.0.0.1:1/")]
    errors = list(_check_notices([missing, unset, *fine]))
    assert ["no-such-program" in errors[0].expected, "POLYREME_TEST_NO_TOKEN" in errors[1].expected] == [True, True]
    assert len(errors) == 2


@pytest.mark.parametrize(
    ("family", "tied", "engine", "errors"),
    [("olmoe", True, "vllm", 1), ("olmoe", True, "mine", 0), ("olmoe", False, "vllm", 0), ("mixtral", True, "vllm", 0)],
)
def test_an_engine_with_an_output_layer_of_its_own_needs_an_untied_model(
    family: str, tied: bool, engine: str, errors: int, tmp_path: Path
) -> None:
    fields = MIXTRAL | {"model_type": family, "num_experts": 4, "tie_word_embeddings": tied}
    base = run_config(tmp_path)
    config = base.model_copy(update={"rollout": base.rollout.model_copy(update={"engine": engine})})
    assert len(list(_check_engine(read_architecture(HfConfig(fields)), config))) == errors
