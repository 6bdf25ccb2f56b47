"""TRL: every key of its published configurations has a fate, and a translated file trains what the original trained."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.config.run import RunConfig
from polyreme.dataset.source import as_sources
from polyreme.errors import ConfigError
from polyreme.import_config.application import Imported
from polyreme.import_config.systems import import_file
from support.imports import import_text, lost_keys, mathematics

PUBLISHED: dict[str, list[Any]] = yaml.safe_load((Path(__file__).parent / "published" / "trl.yaml").read_text())["keys"]
BASE = {
    "model_name_or_path": "m",
    "dataset_name": "d",
    "num_processes": 4,
    "reward_funcs": ["accuracy_reward"],
    "scale_rewards": "group",
}


def imported(options: dict[str, Any], rows: int = 1600) -> tuple[Imported, RunConfig]:
    return import_text(yaml.safe_dump({**BASE, **options}, sort_keys=False), "trl", rows=rows)


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in ("loss_type", "scale_rewards", "lr_scheduler_type", "vllm_importance_sampling_mode", "reward_funcs", "beta",
                              "multi_objective_aggregation", "save_steps", "datasets", "dataset_mixture.datasets", "lora_target_modules")
     for value in PUBLISHED[key]],
)  # fmt: skip
def test_every_published_choice_is_a_valid_run(key: str, value: Any) -> None:
    base = {} if "datasets" not in key else {"dataset_name": "unused"}
    imported({**base, "use_vllm": True, "use_peft": True, key: value})


def test_mathematics_of_grpo_with_its_defaults() -> None:
    """4 processes x 8 completions are 4 prompts of 8 completions and one step. 3 passes of 1600 rows are 1200 iterations, linear to 0."""
    found, run = imported({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"})
    assert mathematics(run) == {
        "advantage": {"kind": "group_norm", "std_floor": 1e-4, "ddof": 1},
        "loss": {"kind": "clip", "low": 0.2, "high": 0.2, "dual": None, "ratio": "token"},
        "aggregation": "token-mean",
        "kl": None,
        "rates": pytest.approx([1e-6 * (1200 - i) / 1200 for i in (0, 1, 599, 1198, 1199)]),
        "critic rates": None,
        "batch": (4, 8, 1, 1),
        "ranks": ("tensor 1 x data 4", 1, 1),
    }
    assert [each.model_dump() for each in run.algorithm.correction if not isinstance(each, str)] == [
        {"kind": "token_tis", "cap": 3.0}
    ]
    assert (run.seed, run.rollout.max_new_tokens, run.trainer.optimizer.weight_decay) == (42, 512, 0.0)
    assert not found.lost


def test_mathematics_of_several_steps_and_passes() -> None:
    """2 x 4 x 8 completions are 64: 16 prompts of 4. A step has 2 x 4 x 2 = 16 completions, so 4 steps, twice: 8 steps an iteration."""
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 8,
        "num_generations": 4,
    }
    options |= {"num_iterations": 2, "max_steps": 800, "warmup_steps": 80, "lr_scheduler_type": "cosine_with_min_lr"}
    options |= {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "learning_rate": 2e-6, "beta": 0.04, "loss_type": "dr_grpo"}
    _, run = imported({**options, "epsilon_high": 0.28, "delta": 1.5, "scale_rewards": False, "adam_beta2": 0.95})
    middle, before, last = (2e-7 + 1.8e-6 * (1 + math.cos(math.pi * (i - 11) / 90)) / 2 for i in (50, 99, 100))
    assert mathematics(run) == {
        "advantage": {"kind": "group_mean", "whiten": False},
        "loss": {"kind": "clip", "low": 0.2, "high": 0.28, "dual": 1.5, "ratio": "token"},
        "aggregation": "seq-mean-token-sum-norm",
        "kl": {"place": "loss", "estimator": "k3+", "coef": 0.04},  # use_bias_correction_kl is the default since 1.0
        "rates": pytest.approx([2e-7, 4e-7, middle, before, last]),  # 800 / 8 = 100 iterations, 10 of them warm-up
        "critic rates": None,
        "batch": (16, 4, 4, 2),
        "ranks": ("tensor 1 x data 4", 1, 1),
    }
    assert (run.iterations, run.trainer.optimizer.beta2) == (100, 0.95)


def test_mathematics_of_cispo_with_trl_units() -> None:
    """epsilon_high 5.0 is the largest weight, which is 1 + high here."""
    _, run = imported(
        {"loss_type": "cispo", "epsilon_high": 5.0, "lr_scheduler_type": "constant", "warmup_ratio": 0.1, "max_steps": 10}
    )
    assert mathematics(run) == {
        "advantage": {"kind": "group_norm", "std_floor": 1e-4, "ddof": 1},
        "loss": {"kind": "cispo", "low": 1.0, "high": 4.0},
        "aggregation": "token-mean",
        "kl": None,
        "rates": [1e-6] * 5,
        "critic rates": None,
        "batch": (4, 8, 1, 1),
        "ranks": ("tensor 1 x data 4", 1, 1),
    }


def test_mathematics_of_rloo(tmp_path: Path) -> None:
    """RLOO has 2 completions of a prompt and a KL of 0.05 in the score of the whole completion."""
    (tmp_path / "rloo_config.yaml").write_text(yaml.safe_dump({**BASE, "max_steps": 100, "per_device_train_batch_size": 4}))
    system, found = import_file(tmp_path / "rloo_config.yaml")
    assert system.name == "trl" and found.values["algorithm.preset"] == "rloo"
    _, run = imported(
        {"reward_clip_range": [-5, 5], "max_steps": 100, "warmup_ratio": 0.1, "lr_scheduler_type": "constant_with_warmup"}
    )
    assert mathematics(run) == {
        "advantage": {"kind": "leave_one_out"},
        "loss": {"kind": "clip", "low": 0.2, "high": 0.2, "dual": None, "ratio": "token"},
        "aggregation": "seq-mean-token-sum",
        "kl": {"place": "reward", "estimator": "k1", "coef": 0.05},
        "rates": pytest.approx([1e-7, 2e-7, 1e-6, 1e-6, 1e-6]),
        "critic rates": None,
        "batch": (16, 2, 1, 1),
        "ranks": ("tensor 1 x data 4", 1, 1),
    }
    assert run.algorithm.shaping.clip == (-5, 5)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"loss_type": "grpo"}, ("clip", "seq-mean-token-mean")),
        ({"loss_type": "bnpo"}, ("clip", "token-mean")),
        ({"loss_type": "luspo"}, ("clip", "seq-mean-token-sum")),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.2}, ("sapo", "seq-mean-token-mean")),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, ("clip", "seq-mean-token-mean")),
    ],
)
def test_losses(options: dict[str, Any], wanted: tuple[str, str]) -> None:
    _, run = imported(options)
    assert (run.algorithm.loss.kind, run.algorithm.aggregation) == wanted
    assert getattr(run.algorithm.loss, "ratio", None) == (
        None if wanted[0] == "sapo" else options.get("importance_sampling_level", "token")
    )
    assert getattr(run.algorithm.loss, "tau_negative", 1.2) == 1.2


def test_scores_scaled_by_the_batch_and_rewards_normalised_apart() -> None:
    found, run = imported({"scale_rewards": "batch"})
    assert run.algorithm.advantage.model_dump() == {"kind": "group_mean", "whiten": True}
    assert "CHECK" in found.comments["algorithm.advantage.whiten"]
    _, run = imported({"multi_objective_aggregation": "normalize_then_sum"})
    assert (run.algorithm.preset, run.algorithm.advantage.kind) == ("gdpo", "per_part")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"loss_type": "vespo"}, "vespo"),
        ({"loss_type": "cispo"}, "epsilon_high above 1"),
        ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, "importance_sampling_level"),
        ({"importance_sampling_level": "sequence_token"}, "sequence_token"),
        ({"scale_rewards": "all"}, "scale_rewards"),
        ({"optim": "adafactor"}, "adafactor"),
        ({"loss_type": "sigmoid"}, "polyreme dpo"),
        ({"precompute_ref_log_probs": True}, "polyreme dpo"),
        ({"desirable_weight": 1.0}, "loss.kind: kto"),
        ({"packing": True}, "polyreme sft"),
        ({"center_rewards_coefficient": 0.01}, "polyreme reward-model"),
        ({"cliprange_value": 0.2}, "algorithm.preset: ppo"),
        ({"rloo_k": 4}, "algorithm.preset: rloo"),
        ({"beta": "much"}, "kl.coef"),
        ({"num_generations": "many"}, "many"),
    ],
)
def test_what_is_refused_names_where_to_go(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        imported(options)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"reward_funcs": ["accuracy_reward", "think_format_reward"]},
         [{"name": "math", "weight": 1.0}, {"name": "think_format", "options": {"answer": None}, "weight": 1.0}]),
        ({"reward_funcs": ["accuracy", "format", "tag_count"], "reward_weights": [1.0, 0.5, 0.25]},
         [{"name": "math", "weight": 1.0}, {"name": "think_format", "weight": 0.5},
          {"name": "tag_count", "file": "FILL_IN/tag_count.py", "weight": 0.25}]),
        ({"reward_funcs": ["my.rewards.short"]},
         [{"name": "short", "module": "my.rewards", "function": "short", "weight": 1.0}]),
        ({"reward_model_name_or_path": "rm", "reward_funcs": "accuracy", "reward_weights": [0.3, 0.7]},
         [{"model": "rm", "weight": 0.3}, {"name": "math", "weight": 0.7}]),
        ({"reward_funcs": ["accuracy_reward", "reasoning_accuracy_reward"]}, [{"name": "math", "weight": 2.0}]),
        ({"reward_funcs": ["repetition_penalty"], "repetition_n_grams": 4, "repetition_max_penalty": -0.5},
         [{"name": "repetition", "options": {"size": 4}, "weight": 0.5}]),
        ({"reward_funcs": ["soft_overlong_punishment"], "max_completion_len": 100},
         [{"name": "soft_overlong_punishment", "file": "FILL_IN/soft_overlong_punishment.py", "weight": 1.0}]),
        ({"reward_funcs": None}, [{"name": "reward", "file": "FILL_IN/reward.py"}]),
    ],
)  # fmt: skip
def test_every_reward_appears(options: dict[str, Any], wanted: list[dict[str, Any]]) -> None:
    found, _ = imported(options)
    assert found.values["reward.rewards"] == wanted
    assert "CHECK" in found.comments["reward.rewards"]


def test_the_overlong_punishment_is_the_penalty_of_the_response_length() -> None:
    options = {"reward_funcs": ["accuracy", "soft_overlong_punishment"], "reward_weights": [1.0, 0.5]}
    _, run = imported({**options, "max_completion_len": 20480, "soft_punish_cache": 4096, "max_completion_length": 20480})
    overlong = run.algorithm.shaping.overlong
    assert overlong is not None and (overlong.buffer, overlong.factor) == (0.2, 0.5)
    assert run.reward is not None and [each.label for each in run.reward.rewards] == ["math"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "auto"),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, []),
        ({"use_vllm": True}, [{"kind": "sequence_tis", "cap": 3.0}]),
        ({"use_vllm": True, "vllm_device": "auto"}, []),  # a key of the versions before the correction
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_cap": 2.0},
         [{"kind": "token_tis", "cap": 2.0}]),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5,
          "vllm_importance_sampling_clip_max": 4.0}, [{"kind": "icepop", "low": 0.5, "high": 4.0}]),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "sequence_truncate"}, [{"kind": "sequence_tis", "cap": 3.0}]),
    ],
)  # fmt: skip
def test_correction_of_the_engine(options: dict[str, Any], wanted: Any) -> None:
    found, _ = imported(options)
    assert found.values["algorithm.correction"] == wanted
    check = options.get("use_vllm") and "vllm_importance_sampling_mode" not in options and wanted
    assert ("CHECK" in found.comments["algorithm.correction"]) == bool(check)


@pytest.mark.parametrize(
    ("options", "estimator"), [({}, "k3+"), ({"use_bias_correction_kl": False}, "k3"), ({"max_prompt_length": 512}, "k3")]
)
def test_the_gradient_of_the_kl(options: dict[str, Any], estimator: str) -> None:
    assert imported({**options, "beta": 0.1})[0].values["algorithm.kl.estimator"] == estimator


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"tools": ["search"], "top_p": 0.9}, ["tools", "top_p", "reward.rewards"]),
        ({"top_k": 50, "min_p": 0.1, "repetition_penalty": 1.2}, ["top_k", "min_p", "repetition_penalty"]),
        ({"top_k": 0, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}, []),
        ({"generation_kwargs": {"length_penalty": 2}}, ["generation_kwargs.length_penalty"]),
        ({"top_entropy_quantile": 0.2}, ["top_entropy_quantile"]),
        ({"use_adaptive_entropy": True, "entropy_target": 0.1}, ["use_adaptive_entropy", "entropy_target"]),
        ({"entropy_target": 0.1}, []),
        ({"off_policy_mask_threshold": 0.5}, ["off_policy_mask_threshold"]),
        ({"sync_ref_model": True, "beta": 0.1}, ["sync_ref_model"]),
        ({"sync_ref_model": True, "beta": 0.0}, []),
        ({"chat_template": "{{ x }}"}, ["chat_template"]),
        ({"dataset_name": "rows.jsonl", "dataset_config": "all"}, ["dataset_config"]),
        ({"dataset_name": "a/b", "dataset_train_split": "train[:5%]"}, ["dataset_train_split"]),
        ({"use_peft": True, "lora_modules_to_save": ["lm_head"]}, ["lora_dropout", "lora_modules_to_save"]),
        ({"use_peft": True, "lora_dropout": 0.0, "use_dora": True}, ["use_dora"]),
        ({"lora_modules_to_save": ["lm_head"]}, []),
        ({"load_in_4bit": True}, ["load_in_4bit"]),
        ({"optim": "paged_adamw_8bit"}, ["optim"]),
        ({"fp16": True}, ["fp16"]),
        ({"lr_scheduler_type": "inverse_sqrt"}, ["lr_scheduler_type"]),
        ({"lr_scheduler_kwargs": {"num_cycles": 3}}, ["lr_scheduler_kwargs.num_cycles"]),
        ({"neftune_noise_alpha": 5}, ["neftune_noise_alpha"]),
        ({"load_best_model_at_end": True}, ["load_best_model_at_end"]),
        ({"normalize_advantages": True}, ["normalize_advantages"]),
        ({"never_heard_of": 1}, ["never_heard_of"]),
    ],
)
def test_what_changes_training_and_is_not_carried_over_is_listed(options: dict[str, Any], lost: list[str]) -> None:
    assert lost_keys(imported(options)[0]) == lost


def test_defaults_that_changed_are_checked() -> None:
    """A file of the versions before 1.0 does not say which: they had other defaults of beta, loss_type and temperature."""
    keys = {"algorithm.kl": "0.04", "algorithm.aggregation": "grpo", "rollout.temperature": "0.9"}
    found, run = imported({"max_prompt_length": 512})
    assert all("CHECK" in found.comments[key] and word in found.comments[key] for key, word in keys.items())
    assert (run.algorithm.kl, run.algorithm.aggregation, run.rollout.temperature) == (None, "token-mean", 1.0)
    for options in ({"max_prompt_length": 512, "beta": 0.0, "loss_type": "dapo", "temperature": 0.7}, {}):
        found, _ = imported(options)
        assert not [key for key in keys if "CHECK" in found.comments.get(key, "")]


def test_a_reference_that_is_replaced() -> None:
    options = {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 64, "beta": 0.1, "num_iterations": 2}
    _, run = imported(options)
    assert run.algorithm.kl is not None and run.algorithm.kl.renew_interval == 32  # 64 optimizer steps, 2 an iteration


@pytest.mark.parametrize(
    ("options", "warmup"),
    [
        ({"warmup_steps": 30}, 30),
        ({"warmup_steps": 30, "num_iterations": 4}, 8),  # 30 / 4, rounded up
        ({"warmup_ratio": 0.03}, 3),
        ({"warmup_steps": 0.05}, 5),  # transformers 5: a part of the run
        ({"warmup_ratio": 0.03, "warmup_steps": 10}, 10),
        ({"warmup_steps": 30, "lr_scheduler_type": "constant"}, 0),
        ({"warmup_ratio": 0.0}, 0),
    ],
)
def test_warm_up(options: dict[str, Any], warmup: int) -> None:
    steps = 100 * options.get("num_iterations", 1)
    _, run = imported({**options, "max_steps": steps})
    assert (run.iterations, run.trainer.optimizer.warmup) == (100, warmup)


def test_intervals_count_steps_or_parts_of_the_run() -> None:
    options = {"max_steps": 200, "num_iterations": 2, "save_steps": 0.1, "eval_steps": 20, "eval_strategy": "steps"}
    _, run = imported(options)
    assert (run.iterations, run.trainer.save_interval, run.eval_interval) == (100, 10, 10)
    assert imported({"save_strategy": "epoch", "save_steps": 5})[1].trainer.save_interval == 0


def test_an_optimizer_step_over_several_generations() -> None:
    """One generation has 8 x 4 completions; a step accumulates 4 of them: 128 completions, 16 prompts of 8, one step."""
    _, run = imported({"steps_per_generation": 1, "gradient_accumulation_steps": 4})
    assert (run.groups_per_iteration, run.group_size, run.algorithm.minibatches) == (16, 8, 1)


def test_processes_and_the_trainer_come_from_a_launch_script(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({key: value for key, value in BASE.items() if key != "num_processes"}))
    (tmp_path / "run.sh").write_text(
        "accelerate launch --num_processes=6 src/rloo.py --config c.yaml --no_gradient_checkpointing\n"
    )
    system, found = import_file(tmp_path / "run.sh")
    assert system.name == "trl" and found.values["trainer.parallel.data"] == 6
    assert found.values["algorithm.preset"] == "rloo" and "trainer.recompute" not in found.values
    (tmp_path / "run.sh").write_text("python src/grpo.py --config c.yaml\n")
    _, found = import_file(tmp_path / "run.sh")
    assert "how many processes" in found.comments["groups_per_iteration"]
    assert found.values["algorithm.preset"] == "grpo" and "CHECK" not in found.comments["algorithm.preset"]


def test_columns_and_mixtures_of_data() -> None:
    found, run = imported({"dataset_prompt_column": "problem", "system_prompt": "Think."})
    assert (run.data.prompt_key, run.data.system) == ("problem", "Think.")
    found, _ = imported({"dataset_mixture": {"datasets": [{"id": "a/b", "weight": 0.5}, {"id": "c/d"}]}})
    assert found.values["data.train"] == ["a/b", "c/d"] and "CHECK" in found.comments["data.train"]


def test_a_model_and_data_that_the_file_does_not_name_must_be_filled_in() -> None:
    found, _ = import_text("num_generations: 4\nloss_type: grpo\n", "trl", rows=100)
    for key, value in (("model.path", "FILL_IN/model"), ("data.train", "FILL_IN/data")):
        assert found.values[key] == value and "CHECK" in found.comments[key]


@pytest.mark.parametrize("order", [("warmup_steps", "warmup_ratio"), ("warmup_ratio", "warmup_steps")])
def test_steps_of_warmup_win_over_a_part_of_the_run(order: tuple[str, str]) -> None:
    """transformers' get_warmup_steps: the steps, if there are any; 8 steps of 2 per iteration are 4 iterations."""
    options = {"warmup_steps": 8, "warmup_ratio": 0.5}
    _, run = imported({**{key: options[key] for key in order}, "num_iterations": 2, "max_steps": 100})
    assert run.trainer.optimizer.warmup == 4
    assert imported({"warmup_steps": 0, "warmup_ratio": 0.5, "max_steps": 100})[1].trainer.optimizer.warmup == 50


@pytest.mark.parametrize("swapped", [False, True])
def test_a_mixture_wins_over_one_data_set(swapped: bool) -> None:
    options: dict[str, Any] = {"dataset_name": "unused", "datasets": [{"path": "a"}, {"path": "b"}]}
    text = yaml.safe_dump({**BASE, **(dict(reversed(options.items())) if swapped else options)}, sort_keys=False)
    assert import_text(text, "trl", rows=1600)[0].values["data.train"] == ["a", "b"]


def test_a_launcher_counts_processes_beside_nested_options() -> None:
    """64 completions of 8 processes are 8 prompts."""
    command = "accelerate launch --num_processes 8 grpo.py --model_name_or_path m --dataset_name d --num_generations 8 "
    command += (
        "--lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}' --lr_scheduler_type cosine_with_min_lr --reward_funcs accuracy_reward\n"
    )
    run = import_text(command, "trl", rows=1600, suffix=".sh")[1]
    assert (run.groups_per_iteration, run.trainer.parallel.layout) == (8, "tensor 1 x data 8")


def test_names_keep_their_configuration_split_and_revision() -> None:
    found, run = imported(
        {
            "model_name_or_path": "a/b",
            "model_revision": "v2",
            "dataset_name": "c/d",
            "dataset_config": "main",
            "dataset_train_split": "dev",
        }
    )
    assert found.values["model.path"] == "a/b@v2"
    [source] = as_sources(run.data.train)
    assert (str(source.path), source.config, source.split) == ("c/d", "main", "dev")
    assert not lost_keys(found)
