"""The estimate of a whole configuration: the models, the micro-batch, and refused learners."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyreme.config.run import RunConfig
from polyreme.config.stage import STAGES
from polyreme.display.summary import redis_bytes
from polyreme.errors import ConfigError
from polyreme_trainer.memory.estimate import moments
from polyreme_trainer.memory.memory_estimate import announce, fit_errors, learner_memory, memory_lines, micro_batch_of, models_of
from polyreme_trainer.memory.sharding import Sharding
from support.published import PARAMETERS, published_config

NAME = "Qwen2.5-0.5B-Instruct"


def run(folder: Path, **changes: Any) -> RunConfig:
    """A run of the published model; `changes` replace top-level keys."""
    return RunConfig.model_validate(
        {
            "iterations": 10,
            "groups_per_iteration": 16,
            "group_size": 4,
            "model": {"path": published_config(NAME, folder / "model"), "dtype": "bfloat16"},
            "data": {"train": folder / "train.jsonl", "max_prompt_tokens": 256},
            "rollout": {"max_new_tokens": 768, "max_model_len": 1024},
            "reward": {"rewards": [{"name": "exact"}]},
            "algorithm": {"preset": "dapo"},
            "trainer": {"optimizer": {"lr": 1e-6}},
            **changes,
        }
    )


def state_bytes(config: Any) -> int:
    return sum(term.nbytes for term in learner_memory(config).rank.state)


@pytest.mark.parametrize(
    ("algorithm", "ema", "each"),
    [({"preset": "dapo"}, None, 18), ({"preset": "rloo"}, None, 18 + 2), ({"preset": "rloo"}, 0.9, 18 + 2 + 4)],
)
def test_each_role_adds_its_bytes(algorithm: dict[str, Any], ema: float | None, each: int, tmp_path: Path) -> None:
    config = run(tmp_path, algorithm=algorithm, trainer={"optimizer": {"lr": 1e-6}, "ema_decay": ema})
    assert state_bytes(config) == each * PARAMETERS[NAME]


@pytest.mark.parametrize(
    ("changes", "algorithm", "references"),
    [
        ({}, {"preset": "rloo"}, 0),
        ({"sft": [{"data": "rows.jsonl", "steps": 1, "batch_size": 1, "lr": 1e-6}]}, {"preset": "rloo"}, 1),
        ({}, {"preset": "rloo", "kl": {"renew_interval": 2}}, 1),
        ({}, {"preset": "dapo"}, 0),
    ],
)
def test_with_adapters_only_a_reference_with_adapters_of_its_own_takes_memory(
    changes: dict[str, Any], algorithm: dict[str, Any], references: int, tmp_path: Path
) -> None:
    config = run(tmp_path, algorithm=algorithm, trainer={"optimizer": {"lr": 1e-6}, "lora": {"rank": 8}, **changes})
    actor = models_of(config)[0]
    assert actor.adapter is not None
    assert state_bytes(config) == 2 * (1 + references) * PARAMETERS[NAME] + 18 * actor.adapter.parameters


def test_a_critic_with_adapters_trains_its_value_head(tmp_path: Path) -> None:
    trainer = {"optimizer": {"lr": 1e-6}, "lora": {"rank": 8}}
    actor, critic = models_of(run(tmp_path, algorithm={"preset": "ppo"}, trainer=trainer))
    assert actor.adapter is not None and critic.adapter is not None
    assert critic.adapter.parameters == actor.adapter.parameters + 896


def test_a_critic_has_a_value_head_in_place_of_the_tied_output(tmp_path: Path) -> None:
    config = run(tmp_path, algorithm={"preset": "ppo"})
    assert [(model.role, model.arch.head, model.trained) for model in models_of(config)] == [
        ("actor", "tied", True),
        ("critic", "value", True),
        ("reference", "tied", False),
    ]
    assert state_bytes(config) == (18 + 18 + 2) * PARAMETERS[NAME] + 18 * 896


@pytest.mark.parametrize(
    ("stage", "changes", "each"),
    [("sft", {}, 18), ("dpo", {}, 18 + 2), ("dpo", {"loss": {"kind": "simpo"}}, 18), ("reward-model", {}, 18)],
)
def test_a_stage_holds_its_model_and_a_reference_where_its_loss_has_one(
    stage: str, changes: dict[str, Any], each: int, tmp_path: Path
) -> None:
    config = STAGES[stage].model_validate(
        {
            "stage": stage,
            "model": {"path": published_config(NAME, tmp_path / "model"), "dtype": "bfloat16"},
            "data": {"train": tmp_path / "train.jsonl"},
            "trainer": {"optimizer": {"lr": 1e-6}, "batch_size": 8},
            **changes,
        }
    )
    head = 18 * 896 if stage == "reward-model" else 0
    assert state_bytes(config) == each * PARAMETERS[NAME] + head
    (machine,) = learner_memory(config).machines
    assert machine.arena is None and machine.checkpoint.nbytes == 16 * (PARAMETERS[NAME] + head // 18)


@pytest.mark.parametrize(
    ("budget", "ranks", "tokens"),
    [
        (8192, {}, 8192),
        (512, {}, 1024),
        (10**6, {}, 64 * 1024),
        (10**6, {"data": 4}, 16 * 1024),
        (8191, {"context": 2}, 4096),
        (10**6, {"data": 4, "context": 2}, 8 * 1024),
    ],
)
def test_a_micro_batch_is_its_budget_or_one_sequence_or_all_there_is(
    budget: int, ranks: dict[str, int], tokens: int, tmp_path: Path
) -> None:
    trainer = {"optimizer": {"lr": 1e-6}, "micro_batch_tokens": budget, "parallel": ranks}
    assert micro_batch_of(run(tmp_path, trainer=trainer)).tokens == tokens


def test_a_device_must_hold_one_rank_and_a_machine_all_of_them(tmp_path: Path) -> None:
    trainer = {"optimizer": {"lr": 1e-6}, "parallel": {"tensor": 2, "data": 4, "nodes": 2}}
    on_device, on_cpu = run(tmp_path, device="cuda", trainer=trainer), run(tmp_path, trainer=trainer)
    rank = learner_memory(on_device).rank.nbytes
    assert not list(fit_errors(on_device, rank))
    [error] = fit_errors(on_device, rank - 1)
    assert isinstance(error, ConfigError)
    assert all(term in error.found for term in ("actor weights", "actor optimizer", "actor activations", "actor logits"))
    # On the first of the machines: the arena, the deltas, and of a checkpoint the weights, half of the optimizer and the export.
    machine = 4 * learner_memory(on_cpu).rank.nbytes + (3 * 2 + 2 // 2 + 2 + 12 // 2 + 2) * PARAMETERS[NAME]
    assert not list(fit_errors(on_cpu, machine))
    assert len(list(fit_errors(on_cpu, machine - 1))) == 1


def test_a_model_that_does_not_divide_is_refused_on_every_device(tmp_path: Path) -> None:
    config = run(tmp_path, device="cuda", trainer={"optimizer": {"lr": 1e-6}, "parallel": {"tensor": 4}})
    [error] = fit_errors(config, None)
    assert isinstance(error, ConfigError) and "heads = 14" in error.found


def test_expert_ranks_of_a_model_without_experts_are_refused(tmp_path: Path) -> None:
    trainer = {"optimizer": {"lr": 1e-6}, "parallel": {"data": 2, "expert": 2}}
    (error,) = fit_errors(run(tmp_path, trainer=trainer), None)
    assert isinstance(error, ConfigError) and "qwen2 has no experts" in error.found


def test_the_lines_add_up(tmp_path: Path) -> None:
    config = run(tmp_path, algorithm={"preset": "ppo"})
    header, *lines = memory_lines(config)
    numbers = [float(line.split()[0].replace(",", "")) for line in lines if line.startswith("  ")]
    assert header.startswith("memory") and abs(sum(numbers[:-1]) - numbers[-1]) < 0.01
    assert (
        "key-value cache" in lines[-1] and "actor optimizer" in lines[-2] and "0.5 x" in lines[-3] and "3 versions" in lines[-4]
    )


def test_the_learner_logs_the_estimate_once_and_every_rank_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = run(tmp_path, device="cuda", trainer={"optimizer": {"lr": 1e-6}, "parallel": {"data": 2}})
    caplog.set_level(logging.INFO)
    announce(config, 2**40, 2**44, rank=1)
    assert not caplog.records
    announce(config, 2**40, 2**44, rank=0)
    assert [record.getMessage() for record in caplog.records] == list(memory_lines(config))
    with pytest.raises(ConfigError):
        announce(config, 2**30, 2**44, rank=1)


def test_an_entropy_bonus_needs_more_logits(tmp_path: Path) -> None:
    bonus = run(tmp_path, algorithm={"preset": "dapo", "entropy_coef": 0.01})
    assert micro_batch_of(bonus) == replace(micro_batch_of(run(tmp_path)), entropy=True)


def test_data_ranks_divide_the_optimizer_alone(tmp_path: Path) -> None:
    trainer = {"optimizer": {"lr": 1e-6}, "parallel": {"data": 4}}
    assert state_bytes(run(tmp_path, trainer=trainer)) == (2 + 4 + 12 // 4) * PARAMETERS[NAME]


OFFLOAD = {"optimizer": {"lr": 1e-6}, "offload": {"optimizer": True, "idle_models": True}}


TINY = {"data": {"train": "x", "max_prompt_tokens": 1}, "rollout": {"max_new_tokens": 2, "max_model_len": 4}}
"""A prompt of one token and a short response: almost no activations."""


def test_with_offload_one_model_trains_on_the_device_and_the_rest_is_on_the_host(tmp_path: Path) -> None:
    config, plain = (run(tmp_path, algorithm={"preset": "ppo"}, device="cuda", **part) for part in ({"trainer": OFFLOAD}, {}))
    memory, before = learner_memory(config), learner_memory(plain)
    assert state_bytes(config) == (2 + 4) * PARAMETERS[NAME]
    assert memory.rank.host_bytes == (2 + 2 + 2 + 12 + 12) * PARAMETERS[NAME] + 14 * 896
    assert memory.rank.nbytes - state_bytes(config) == before.rank.nbytes - state_bytes(plain), "the same activations"
    (machine,) = before.machines
    assert (before.rank.host_bytes, machine.host) == (0, sum(term.nbytes for term in machine.shared))
    lines = list(memory_lines(config))
    assert f"{memory.rank.host_bytes / 2**30:,.3f}    in all; 1 rank(s)" in "\n".join(lines)
    assert sum(line.startswith("memory         of the host") for line in lines) == 1
    assert not any(line.startswith("memory         of the host") for line in memory_lines(plain))


def test_the_step_of_an_offloaded_optimizer_may_be_the_peak(tmp_path: Path) -> None:
    trainer = {**OFFLOAD, "micro_batch_tokens": 1, "recompute": "full"}
    on_device, on_cpu = (learner_memory(run(tmp_path, device=device, trainer=trainer, **TINY)).rank for device in ("cuda", "cpu"))
    embedding = 151936 * 896
    assert [(term.name, term.nbytes) for term in on_device.step] == [("actor optimizer step", 12 * embedding)]
    assert on_device.all_bytes == 18 * PARAMETERS[NAME], "what moves is not in the host's memory meanwhile"
    assert on_cpu.all_bytes > on_device.all_bytes and on_cpu.nbytes < on_device.nbytes


def test_two_models_are_on_the_device_while_one_takes_the_weights_of_the_other(tmp_path: Path) -> None:
    """With adapters this is the peak, because almost nothing else is on the device: a critic starts as the actor, each layer merged."""
    trainer = {**OFFLOAD, "lora": {"rank": 64}, "micro_batch_tokens": 1, "recompute": "full"}
    config = run(tmp_path, device="cuda", algorithm={"preset": "ppo"}, trainer=trainer, **TINY)
    rank, (actor, critic) = learner_memory(config).rank, models_of(config)
    assert actor.adapter is not None and critic.adapter is not None
    assert sum(term.nbytes for term in rank.state) == 2 * sum(
        each.parameters for each in (actor.arch, actor.adapter, critic.arch, critic.adapter)
    )
    assert [(term.name, term.nbytes) for term in rank.step] == [("actor merged layer", (4 + 4 + 2) * 2 * 4864 * 896)]
    own = run(
        tmp_path, device="cuda", algorithm={"preset": "ppo"}, trainer={**trainer, "critic": {"path": config.model.path}}, **TINY
    )
    assert learner_memory(own).rank.nbytes < rank.nbytes, "a critic with weights of its own copies nothing"
    on_cpu = learner_memory(run(tmp_path, algorithm={"preset": "ppo"}, trainer=trainer, **TINY)).rank
    assert any(term.name.endswith(" gradients") for term in on_cpu.terms), "no weights leave the memory of a CPU"


@pytest.mark.parametrize(("kl", "roles"), [({}, []), ({"renew_interval": 2}, ["reference"])])
def test_a_critic_takes_the_actor_s_weights_before_a_fixed_reference_is_loaded(
    kl: dict[str, int], roles: list[str], tmp_path: Path
) -> None:
    trainer = {"optimizer": {"lr": 1e-6}, "offload": {"optimizer": True}}
    config = run(tmp_path, algorithm={"preset": "ppo", "kl": kl}, trainer=trainer)
    found = moments(models_of(config), Sharding(), micro_batch_of(config), config.trainer.offload)
    assert [term.name for term in found["critic copy"].state] == [f"{role} weights" for role in ("actor", "critic", *roles)]
    assert "reference weights" in [term.name for term in found["critic"].state]


def test_a_moving_average_takes_the_actor_s_weights_in_float32(tmp_path: Path) -> None:
    config = run(tmp_path, trainer={**OFFLOAD, "ema_decay": 0.9, "micro_batch_tokens": 1, "recompute": "full"}, **TINY)
    models = models_of(config)
    found = moments(models, Sharding(), micro_batch_of(config), config.trainer.offload)["moving average copy"]
    embedding = 151936 * 896
    assert found.nbytes == (2 + 4) * PARAMETERS[NAME] + 4 * embedding


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_a_host_must_hold_what_rests_there_and_the_arena(placement: str, tmp_path: Path) -> None:
    config = run(tmp_path, device="cuda", placement=placement, algorithm={"preset": "ppo"}, trainer=OFFLOAD)
    (machine,) = learner_memory(config).machines
    assert not list(fit_errors(config, None, machine.host))
    (error,) = fit_errors(config, None, machine.host - 1)
    assert isinstance(error, ConfigError) and "arena" in error.found
    assert len(list(fit_errors(config, machine.rank.nbytes - 1, machine.host - 1))) == 2
    assert machine.host == machine.rank.host_bytes + sum(term.nbytes for term in machine.shared)


def test_sleeping_replicas_keep_their_weights_in_the_host_s_memory(tmp_path: Path) -> None:
    """With sleep level 2 they drop them."""
    rollout = {"max_new_tokens": 768, "max_model_len": 1024, "replicas": 3, "tensor_parallel": 1}
    levels = {level: {**rollout, "vllm": {"sleep_level": level}} for level in (1, 2)}
    kept, dropped = (run(tmp_path, device="cuda", placement="colocated", rollout=levels[level]) for level in (1, 2))
    first, second = (learner_memory(config).machines[0] for config in (kept, dropped))
    assert first.host - second.host == 3 * 2 * PARAMETERS[NAME] and second.asleep is None
    assert "3 replica(s)" in "\n".join(memory_lines(kept)) and "3 replica(s)" not in "\n".join(memory_lines(dropped))
    (error,) = fit_errors(kept, None, first.host - 1)
    assert isinstance(error, ConfigError) and "weights of sleeping replicas" in error.found
    apart, on_cpu = run(tmp_path, device="cuda", rollout=levels[1]), run(tmp_path, placement="colocated", rollout=levels[1])
    assert [learner_memory(config).machines[0].asleep for config in (apart, on_cpu)] == [None, None]
    spread = run(
        tmp_path,
        device="cuda",
        placement="colocated",
        rollout=levels[1],
        trainer={"optimizer": {"lr": 1e-6}, "parallel": {"data": 2, "nodes": 2}},
    )
    assert [machine.asleep and machine.asleep.nbytes for machine in learner_memory(spread).machines] == [
        2 * 2 * PARAMETERS[NAME]
    ] * 2


def test_an_episode_is_as_long_as_its_context(tmp_path: Path) -> None:
    rollout = {"max_new_tokens": 768, "max_model_len": 4096}
    answers, episodes = (
        run(tmp_path, rollout=rollout, trainer={"optimizer": {"lr": 1e-6}, "micro_batch_tokens": 1}, **sections)
        for sections in ({}, {"reward": None, "environment": {"file": "environment.py"}})
    )
    assert [micro_batch_of(config).padded for config in (answers, episodes)] == [256 + 768, 4096]
    assert redis_bytes(episodes) > 3 * redis_bytes(answers)


def test_on_cpu_both_are_the_same_memory(tmp_path: Path) -> None:
    config, plain = (run(tmp_path, algorithm={"preset": "ppo"}, **part) for part in ({"trainer": OFFLOAD}, {}))
    gradients = 4 * (PARAMETERS[NAME] + 896)
    (machine,), (before,) = learner_memory(config).machines, learner_memory(plain).machines
    assert before.nbytes - machine.nbytes == gradients, "the idle model's alone are saved"
    assert not list(fit_errors(config, machine.nbytes, 0))


def test_each_machine_holds_its_part_of_a_version_and_of_a_checkpoint(tmp_path: Path) -> None:
    """Stages on two machines: each writes its own layers, and the first one also the embedding, the last one the final norm."""
    trainer = {"optimizer": {"lr": 1e-6}, "parallel": {"pipeline": 4, "nodes": 2, "data": 2}}
    config = run(tmp_path, trainer=trainer)
    memory, embedding = learner_memory(config), 151936 * 896
    layers = (PARAMETERS[NAME] - embedding - 896) // 2
    parts = [embedding + layers, layers + 896]
    assert [machine.arena and machine.arena.nbytes for machine in memory.machines] == [3 * 2 * part for part in parts]
    assert [machine.deltas and machine.deltas.nbytes for machine in memory.machines] == parts, "half of a version in bfloat16"
    exported = [2 * PARAMETERS[NAME], 0]
    found = [machine.checkpoint.nbytes for machine in memory.machines if machine.checkpoint]
    assert found == [(2 + 12) * part + export for part, export in zip(parts, exported, strict=True)]
    first, last = memory.machines
    names = [{term.name for term in machine.rank.terms} for machine in memory.machines]
    assert "actor logits" not in names[0] and first.rank.nbytes != last.rank.nbytes, "each machine has its own stages"
    text = "\n".join(memory_lines(config))
    assert all(f"machine {number} of 2: {3 * 2 * part / 2**30:,.3f}" in text for number, part in enumerate(parts, start=1))


def test_each_machine_compares_with_its_own_memory(tmp_path: Path) -> None:
    config = run(tmp_path, trainer={"optimizer": {"lr": 1e-6}, "parallel": {"pipeline": 2, "nodes": 2}})
    first, last = (machine.nbytes for machine in learner_memory(config).machines)
    assert first != last
    for number, nbytes in enumerate((first, last)):
        announce(config, nbytes, nbytes, rank=number)
        with pytest.raises(ConfigError):
            announce(config, nbytes - 1, nbytes, rank=number)
    assert [len(list(fit_errors(config, limit))) for limit in (max(first, last), max(first, last) - 1)] == [0, 1]


@pytest.mark.parametrize("without", [{"weights": {"anchor_interval": 1}}, {"placement": "colocated"}])
def test_a_learner_keeps_deltas_unless_versions_go_whole_or_replicas_share_the_only_machine(
    without: dict[str, Any], tmp_path: Path
) -> None:
    deltas, whole = run(tmp_path), run(tmp_path, **without)
    (first,), (second,) = learner_memory(deltas).machines, learner_memory(whole).machines
    assert first.nbytes - second.nbytes == PARAMETERS[NAME] and second.deltas is None
    both = {"parallel": {"data": 2, "nodes": 2}, "optimizer": {"lr": 1e-6}}
    spread = learner_memory(run(tmp_path, trainer=both, placement="colocated")).machines[0]
    assert spread.deltas is not None and spread.deltas.nbytes == PARAMETERS[NAME], "the other machine has replicas too"
    (error,) = fit_errors(deltas, first.nbytes - 1)
    assert isinstance(error, ConfigError) and "deltas" in error.found
    assert sum("receive deltas" in line for config in (deltas, whole) for line in memory_lines(config)) == 1


def test_machines_with_copies_hold_no_version(tmp_path: Path) -> None:
    config = run(tmp_path, trainer={"optimizer": {"lr": 1e-6}, "parallel": {"data": 2, "nodes": 2}})
    first, second = learner_memory(config).machines
    assert first.arena is not None and first.arena.nbytes == 6 * PARAMETERS[NAME]
    assert (second.arena, second.deltas) == (None, None)
    assert second.checkpoint.nbytes == 12 // 2 * PARAMETERS[NAME]
