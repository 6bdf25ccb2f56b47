"""Runs of several turns become our section `environment`, and what must be written is said first. Bounds are worked out by hand."""

from typing import Any

import pytest
import yaml

from polyreme.config.run import RunConfig
from polyreme.import_config.application import Imported
from polyreme.import_config.rules import Fate
from support.imports import import_text, lost_keys

TURNS = "actor_rollout_ref.rollout.multi_turn"
VERL = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 4,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 2048,
    "trainer.total_training_steps": 10,
}


def imported(values: dict[str, Any]) -> tuple[Imported, list[str], RunConfig]:
    text = "python3 -m verl.trainer.main_ppo " + " ".join(f"{key}={value}" for key, value in (VERL | values).items())
    found, run = import_text(text, "verl", suffix=".sh")
    assert run.environment is None or found.lost[0].fate is Fate.ANOTHER_RUN
    return found, lost_keys(found), run


def verl(values: dict[str, Any]) -> tuple[list[str], RunConfig]:
    return imported(values)[1:]


@pytest.mark.parametrize(
    ("bounds", "turns"),
    [
        ({"max_assistant_turns": 5}, 5),
        ({"max_user_turns": 5}, 6),
        ({"max_assistant_turns": 5, "max_user_turns": 2}, 3),
        ({"max_turns": 4}, 4),
        ({}, 1024),
    ],
)
def test_verls_answers_of_an_episode(bounds: dict[str, int], turns: int) -> None:
    """It ends after an answer when there are as many answers or as many messages to it; else 3072 tokens bound it."""
    lost, run = verl({f"{TURNS}.enable": True, **{f"{TURNS}.{key}": value for key, value in bounds.items()}})
    assert run.environment is not None and run.environment.max_turns == turns
    assert lost == [f"{TURNS}.enable", "reward.rewards"] and run.reward is None


def test_verls_response_length_counts_all_turns() -> None:
    run = verl({f"{TURNS}.enable": True, "actor_rollout_ref.rollout.max_model_len": 32768})[1]
    assert (run.rollout.max_model_len, run.rollout.max_new_tokens) == (3072, 2048)


def test_what_an_environment_cannot_have_is_taken_out_and_said() -> None:
    values = {
        "data.tool_config_path": "tools.yaml",
        "data.val_files": "test.parquet",
        f"{TURNS}.enable": True,
        f"{TURNS}.max_tool_response_length": 256,
        f"{TURNS}.format": "hermes",
        "custom_reward_function.path": "score.py",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": True,
    }
    found, lost, run = imported(values)
    assert lost[0] == "data.tool_config_path" and {*lost[1:]} == {
        f"{TURNS}.max_tool_response_length",
        f"{TURNS}.format",
        "reward.rewards",
        "trainer.moe.replay_routes",
    }
    assert run.environment is not None and str(run.environment.file) == "FILL_IN/environment.py" and run.data.eval is not None
    assert "write this file" in found.comments["environment.file"] and "polyreme init FOLDER --environment" in found.lost[0].note


def test_one_answer_has_no_environment() -> None:
    values = {f"{TURNS}.enable": False, f"{TURNS}.max_assistant_turns": 5, f"{TURNS}.format": "hermes", f"{TURNS}.custom": 1}
    lost, run = verl(values | {"actor_rollout_ref.rollout.agent.default_agent_loop": "single_turn_agent"})
    assert lost == [] and run.environment is None and run.reward is not None


def test_openrlhfs_agent_is_taken_as_it_is() -> None:
    text = (
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --agent_func_path /o/agent.py --rollout_batch_size 8 "
        "--train_batch_size 16 --n_samples_per_prompt 4 --prompt_max_len 1000 --generate_max_len 2000 --eval_dataset e "
        "--advantage_estimator group_norm --top_p 0.98"
    )
    found, run = import_text(text, "openrlhf", rows=64, suffix=".sh")
    assert run.environment is not None and str(run.environment.file) == "/o/agent.py"
    assert run.environment.max_turns == 1000  # 3000 tokens: OpenRLHF's agent itself decides when it ends
    assert found.lost[0].key == "train.agent_func_path" and "AgentInstance" in found.lost[0].note
    assert "`AgentInstance` is played as it is" in found.comments["environment.file"]
    assert lost_keys(found)[1:] == ["rollout.top_p", "data.template"] and run.data.template == "chat"


def test_rounds_of_tool_calls_are_answers_and_one_more() -> None:
    mindspeed = {
        "megatron_training": {"train_iters": 10, "global_batch_size": 8, "tokenizer_name_or_path": "q", "data_path": "d"},
        "rl_config": {
            "n_samples_per_prompt": 4,
            "multi_turn_enable": True,
            "max_tool_calls": 3,
            "max_total_response_length": 4096,
        },
        "generate_config": {"sampling_config": {"max_tokens": 1024, "temperature": 1.0, "top_k": -1}},
    }
    found, run = import_text(yaml.safe_dump(mindspeed), "mindspeed")
    assert run.environment is not None and run.environment.max_turns == 4
    assert run.rollout.max_model_len == 512 + 4096 and found.lost[0].key == "rl_config.multi_turn_enable"
    trl = {"model_name_or_path": "m", "max_tool_calling_iterations": 3, "num_processes": 8, "reward_funcs": ["accuracy_reward"]}
    found, run = import_text(yaml.safe_dump(trl), "trl", rows=64)
    assert run.environment is not None and run.environment.max_turns == 4
    assert lost_keys(found) == ["max_tool_calling_iterations", "reward.rewards"]
