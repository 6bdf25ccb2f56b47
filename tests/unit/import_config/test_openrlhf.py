"""OpenRLHF: every option of its published scripts has a fate, and a translated command line trains what the original trained."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme.import_config.application import Imported
from polyreme.import_config.openrlhf_names import RENAMED
from polyreme.import_config.rules import Fate
from polyreme.import_config.systems import SYSTEMS
from support.imports import import_text, lost_keys, mathematics

PUBLISHED: dict[str, dict[str, list[Any]]] = yaml.safe_load((Path(__file__).parent / "published" / "openrlhf.yaml").read_text())
OPTIONS = [(name, value) for names in PUBLISHED.values() for name, values in names.items() for value in values]
BASE = {
    "pretrain": "m",
    "prompt_data": "d",
    "remote_rm_url": "r.py",
    "advantage_estimator": "reinforce",
    "n_samples_per_prompt": 2,
}


def command(options: dict[str, Any]) -> str:
    words = [f"--{key}" + ("" if value is True else " " + _words(value)) for key, value in options.items()]
    return "python3 -m openrlhf.cli.train_ppo_ray " + " \\\n   ".join(words)


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else f"'{value}'"


def imported(options: dict[str, Any], rows: int = 102_400) -> tuple[Imported, RunConfig]:
    return import_text(command({**BASE, **options}), "openrlhf", rows=rows, suffix=".sh")


def test_every_published_option_is_known() -> None:
    names = {RENAMED.get(name, name) for name, _ in OPTIONS}
    assert len(names) > 150
    assert not [name for name in names if not SYSTEMS["openrlhf"].rules_of(name)]
    assert not [rule.key for rule in SYSTEMS["openrlhf"].rules if rule.key.endswith("*")]  # each option has its own fate


@pytest.mark.parametrize(
    ("name", "value"),
    [
        each
        for each in OPTIONS
        if each[0].startswith(("algo.", "actor.p", "actor.lr", "actor.eps", "actor.loss", "reward.", "ds.lora"))
    ],
)
def test_every_published_choice_of_an_algorithm_is_a_valid_run(name: str, value: Any) -> None:
    base = {other: each for other, each in BASE.items() if RENAMED[other] != name}
    imported({**base, "advantage_estimator": "group_norm", "kl_estimator": "k3", name: value})


def cosine(rate: float, least: float, warmup: int, total: int) -> list[float]:
    """transformers' cosine with linear warm-up, in iterations: the first two, the middle, and the last two."""
    rates = []
    for i in (1, 2, total // 2, total - 1, total):
        progress = (i - 1 - warmup) / (total - warmup)
        rates.append(rate * i / warmup if i <= warmup else least + (rate - least) * (1 + math.cos(math.pi * progress)) / 2)
    return rates


def test_mathematics_of_ppo_with_its_defaults() -> None:
    """102400 prompts / 1024 are 100 iterations, of which 3% are 3. Both rates fall to a tenth. 1024 samples / 128 are 8 steps."""
    options = {"advantage_estimator": "gae", "n_samples_per_prompt": 1, "actor_learning_rate": 5e-7, "critic_learning_rate": 9e-6}
    found, run = imported({**options, "vllm_num_engines": 4, "vllm_tensor_parallel_size": 2, "colocate_all_models": True})
    assert mathematics(run) == {
        "advantage": {"kind": "gae", "gamma": 1.0, "lam": 1.0, "value_lam": None, "bootstrap_truncated": False, "whiten": True,
                      "value_clip": 0.5},
        "loss": {"kind": "clip", "low": 0.2, "high": 0.2, "dual": None, "ratio": "token"},
        "aggregation": "token-mean",
        "kl": {"place": "reward", "estimator": "k1", "coef": 0.01},
        "rates": pytest.approx(cosine(5e-7, 5e-8, 3, 100)),
        "critic rates": pytest.approx(cosine(9e-6, 9e-7, 3, 100)),
        "batch": (1024, 1, 8, 1),
        "ranks": ("tensor 1 x data 8", 4, 2),
    }  # fmt: skip
    assert run.algorithm.correction == () and run.algorithm.shaping.clip == (-10, 10)
    optimizers = (run.trainer.optimizer, run.trainer.critic.optimizer)
    assert all(
        each is not None and (each.beta1, each.beta2, each.weight_decay, each.clip_grad) == (0.9, 0.95, 0, 1)
        for each in optimizers
    )
    assert not found.lost


def test_mathematics_of_grpo_with_clip_higher() -> None:
    """128 prompts x 8 samples in batches of 512 samples are 2 steps; 2 machines x 8 ranks / (2 tensor x 2 ring) are 4 data ranks."""
    options = {"advantage_estimator": "group_norm", "rollout_batch_size": 128, "n_samples_per_prompt": 8, "train_batch_size": 512}
    options |= {"eps_clip_low_high": [0.2, 0.27], "dual_clip": 3, "use_kl_loss": True, "kl_estimator": "k3", "init_kl_coef": 1e-3}
    options |= {"actor_num_nodes": 2, "ds_tensor_parallel_size": 2, "ring_attn_size": 2, "max_epochs": 2, "l2": 0.01}
    _, run = imported({**options, "lr_scheduler": "constant", "actor_learning_rate": 1e-6, "vllm_num_engines": 2}, rows=1280)
    assert mathematics(run) == {
        "advantage": {"kind": "group_norm", "std_floor": 1e-9, "ddof": 1},
        "loss": {"kind": "clip", "low": 0.2, "high": 0.27, "dual": 3.0, "ratio": "token"},
        "aggregation": "token-mean",
        "kl": {"place": "loss", "estimator": "k3", "coef": 1e-3},
        "rates": [1e-6] * 5,  # transformers' constant schedule has no warm-up
        "critic rates": None,
        "batch": (128, 8, 2, 2),
        "ranks": ("tensor 2 x context 2 x data 4", 2, 1),
    }
    assert run.trainer.parallel.nodes == 2 and run.trainer.optimizer.weight_decay == 0.01


def test_mathematics_of_reinforce_with_discount_and_adaptive_kl() -> None:
    """REINFORCE++ discounts. The target of OpenRLHF's KL controller is a mean per token."""
    options = {"gamma": 0.99, "kl_target": 0.01, "kl_horizon": 5000, "generate_max_len": 1024, "rollout_batch_size": 1024}
    found, run = imported({**options, "lr_scheduler": "linear", "lr_warmup_ratio": 0.1, "actor_learning_rate": 1e-6}, rows=20_480)
    assert mathematics(run) == {
        "advantage": {"kind": "returns", "gamma": 0.99, "whiten": True},
        "loss": {"kind": "clip", "low": 0.2, "high": 0.2, "dual": None, "ratio": "token"},
        "aggregation": "token-mean",
        "kl": {
            "place": "reward",
            "estimator": "k1",
            "coef": 0.01,
            "adaptive": {"target": 0.01, "horizon": 5000, "unit": "token"},
        },
        "rates": pytest.approx([0.5e-6, 1e-6, 1e-6 * 11 / 18, 1e-6 * 2 / 18, 1e-6 * 1 / 18]),  # 20 iterations, 2 of them warm-up
        "critic rates": None,
        "batch": (1024, 2, 16, 1),
        "ranks": ("tensor 1 x data 8", 8, 1),
    }
    assert not found.lost


def test_options_of_the_critic_with_dotted_names() -> None:
    options = {
        "algo.advantage.estimator": "gae",
        "critic.adam.lr": 1e-5,
        "critic.lr_scheduler": "linear",
        "critic.adam.betas": [0.8, 0.9],
    }
    options |= {"critic.lr_warmup_ratio": 0.0, "critic.max_norm": 0.5, "critic.freezing_steps": 4, "algo.advantage.lambd": 0.95}
    _, run = import_text(
        command({"actor.model_name_or_path": "m", "data.prompt_dataset": "d", "reward.model_name_or_path": "rm", **options}),
        "openrlhf", rows=10_240, suffix=".sh",
    )  # fmt: skip
    critic = run.trainer.critic.optimizer
    assert critic is not None and (critic.lr, critic.schedule, critic.warmup, critic.min_lr) == (1e-5, "linear", 0, 0)
    assert (critic.beta1, critic.beta2, critic.clip_grad, run.trainer.critic.warmup_iterations) == (0.8, 0.9, 0.5, 4)
    assert (run.trainer.optimizer.schedule, run.trainer.optimizer.beta2, run.trainer.optimizer.warmup) == ("cosine", 0.95, 1)
    assert str(run.trainer.critic.path) == "rm"  # OpenRLHF's critic starts from the first reward model


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, []),
        ({"enable_vllm_is_correction": True}, [{"kind": "token_tis", "cap": 5.0}]),
        ({"enable_vllm_is_correction": True, "vllm_is_truncated_threshold": 2}, [{"kind": "token_tis", "cap": 2}]),
        ({"enable_vllm_is_correction": True, "use_icepop": True}, [{"kind": "icepop", "low": 0.5, "high": 5.0}]),
        ({"enable_vllm_is_correction": True, "vllm_is_correction_type": "icepop"}, [{"kind": "icepop", "low": 0.5, "high": 5.0}]),
        (
            {"enable_vllm_is_correction": True, "vllm_is_correction_type": "seq-mask-tis", "vllm_is_truncated_threshold": [0.9, 1.1]},
            [{"kind": "geometric_mask", "low": 0.9, "high": 1.1}, {"kind": "token_tis", "cap": 1e9}],
        ),
        ({"algo.advantage.is_correction_level": "token"}, [{"kind": "icepop", "low": 0.5, "high": 5.0}]),
        ({"algo.advantage.is_correction_level": "off"}, []),
        (
            {"algo.advantage.is_correction_level": "token", "algo.advantage.is_correction_mode": "clip",
             "algo.advantage.is_correction_threshold": 3.0},
            [{"kind": "token_tis", "cap": 3.0}],
        ),
    ],
)  # fmt: skip
def test_correction_of_the_engine(options: dict[str, Any], wanted: list[dict[str, Any]]) -> None:
    _, run = imported(options)
    assert [each.model_dump() for each in run.algorithm.correction if not isinstance(each, str)] == wanted


def test_a_divergence_as_gate_is_a_loss_and_gspo_corrects_by_its_ratio() -> None:
    gate = {"algo.advantage.is_correction_level": "seq", "algo.advantage.is_correction_gating": "binary_kl"}
    found, run = imported(gate)
    assert "algo.advantage.is_correction_gating" in lost_keys(found) and run.algorithm.correction == ()
    options = {"policy_loss_type": "gspo", "advantage_estimator": "group_norm", "enable_vllm_is_correction": True}
    _, run = imported({**options, "use_kl_loss": True, "kl_estimator": "k2"})
    assert (run.algorithm.anchor, run.algorithm.correction, run.algorithm.aggregation) == ("behaviour", (), "seq-mean-token-mean")


@pytest.mark.parametrize(
    ("options", "wanted", "check"),
    [
        ({"remote_rm_url": "a/r.py"}, [{"file": "a/r.py", "function": "reward_func"}], "Python file"),
        (
            {"remote_rm_url": "http://h:5000/get_reward"},
            [{"url": "http://h:5000/get_reward", "protocol": "openrlhf"}],
            "reachable",
        ),
        ({"remote_rm_url": "http://a,http://b"}, [{"url": ["http://a", "http://b"], "protocol": "openrlhf"}], "share the load"),
        ({"remote_rm_url": None, "reward_pretrain": "x/a,y/b"}, [{"model": "x/a"}, {"model": "y/b"}], "2 rewards are added"),
        ({"remote_rm_url": "$URL"}, [{"name": "remote", "file": "FILL_IN/remote.py"}], "does not say"),
        ({"remote_rm_url": "$DIR/r.py"}, [{"file": "$DIR/r.py", "function": "reward_func"}], "does not say where"),
        ({"remote_rm_url": None}, [{"name": "reward", "file": "FILL_IN/reward.py"}], "no reward"),
    ],
)
def test_every_reward_appears(options: dict[str, Any], wanted: list[dict[str, Any]], check: str) -> None:
    given = {key: value for key, value in {**BASE, **options}.items() if value is not None}
    text = (
        command(given).replace("'$", '"$').replace("URL'", 'URL"').replace("r.py'", 'r.py"')
        if "$" in str(options)
        else command(given)
    )
    found, _ = import_text(text, "openrlhf", rows=1024, suffix=".sh")
    assert found.values["reward.rewards"] == wanted
    assert "CHECK" in found.comments["reward.rewards"] and check in found.comments["reward.rewards"]


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"max_images_per_prompt": 2}, ["data.max_images_per_prompt"]),
        ({"top_p": 1.0, "max_images_per_prompt": 0, "prompt_split": "train", "lora_dropout": 0}, []),
        ({"input_template": "U: {}"}, ["data.input_template"]),
        ({"max_samples": 1000}, ["data.max_samples"]),
        ({"load_in_4bit": True}, ["ds.load_in_4bit"]),
        ({"stop_properly_penalty_coef": 0.0}, ["reward.stop_properly_penalty_coef"]),
        ({"lr_scheduler": "inverse_sqrt"}, ["actor.lr_scheduler"]),
        ({"param_dtype": "fp16"}, ["ds.param_dtype"]),
        ({"no_advantage_std_norm": True}, ["algo.advantage.no_std_norm"]),
        ({"advantage_estimator": "rloo", "reward_clip_range": [-1, 1]}, ["reward.clip_range"]),
        ({"dynamic_filtering": True, "dynamic_filtering_reward_range": [0.1, 0.9], "advantage_estimator": "rloo"},
         ["algo.dynamic_filtering_range"]),
        ({"dynamic_filtering_reward_range": [0.1, 0.9]}, []),
        ({"dynamic_filtering": True}, ["algo.dynamic_filtering_enable"]),
        ({"partial_rollout": True, "async_train": True}, ["train.partial_rollout_enable"]),
        ({"ptx_coef": 0.05}, []),
        ({"pretrain_data": "p", "ptx_coef": 0.05}, ["pretrain_data", "ptx_coef"]),
        ({"use_kl_loss": True, "kl_estimator": "k2", "kl_target": 6}, ["algo.kl.target"]),
        ({"use_kl_loss": True}, ["algo.kl.estimator"]),
    ],
)  # fmt: skip
def test_what_changes_training_and_is_not_carried_over_is_listed(options: dict[str, Any], lost: list[str]) -> None:
    found, _ = imported(options)
    assert lost_keys(found) == lost


def test_an_agent_that_the_script_leaves_open_is_said_first() -> None:
    found, _ = import_text(command({**BASE, "top_p": 0.9}) + " --agent_func_path $AGENT", "openrlhf", rows=1024, suffix=".sh")
    assert found.lost[0].fate is Fate.ANOTHER_RUN and lost_keys(found)[0] == "train.agent_func_path"
    assert found.values["environment.file"] == "$AGENT"


def test_a_group_estimator_with_the_kl_in_the_reward_is_checked() -> None:
    found, _ = imported({"advantage_estimator": "rloo"})
    assert "CHECK" in found.comments["algorithm.kl.place"]


def test_estimators_and_optimizers_without_a_counterpart_are_refused() -> None:
    with pytest.raises(ConfigError, match="flash_reinforce"):
        imported({"algo.advantage.estimator": "flash_reinforce"})
    with pytest.raises(ConfigError, match="muon"):
        imported({"actor.optim": "muon"})


def test_several_data_sets_have_their_probabilities() -> None:
    found, run = imported({"prompt_data": "a/x,b/y", "prompt_data_probs": "0.4,0.6"})
    assert found.values["data.train"] == [{"path": "a/x", "weight": 0.4}, {"path": "b/y", "weight": 0.6}]
    assert run.data.weights == (0.4, 0.6)
    probabilities = command({**BASE, "prompt_data": "a/x,b/y"}) + " --prompt_data_probs $PROBABILITIES"
    assert import_text(probabilities, "openrlhf", suffix=".sh")[0].values["data.train"] == ["a/x", "b/y"]
    assert imported({"prompt_data": "a/x,b/y"})[0].values["data.train"] == ["a/x", "b/y"]


def test_a_directory_of_a_data_set_is_to_be_decided() -> None:
    found, _ = imported({"prompt_data": "a/x@math, b/y", "eval_dataset": "c/z,d/w"})
    assert (found.values["data.train"], found.values["data.eval"]) == (["a/x", "b/y"], ["c/z", "d/w"])
    assert "behind @" in found.comments["data.train"]


def test_asynchronous_training_is_as_stale_as_its_queue() -> None:
    _, run = imported({"async_train": True, "async_queue_size": 2, "colocate_all_models": True})
    assert (run.max_staleness, run.placement) == (2, "separate")
