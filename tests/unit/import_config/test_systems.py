"""Published configurations of other systems become runs of ours, and no key is lost on the way."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.config.load import parse_config
from polyreme.config.recipes.recipe import Clip, Gae, Kl
from polyreme.config.run import RunConfig
from polyreme.config.section import known_keys
from polyreme.errors import ConfigError
from polyreme.import_config.application import apply
from polyreme.import_config.openrlhf_names import RENAMED
from polyreme.import_config.reading.read import read_file
from polyreme.import_config.render import text_of
from polyreme.import_config.rules import Fate
from polyreme.import_config.systems import SYSTEMS, import_file

FILES = sorted((Path(__file__).parent / "files").iterdir())


def imported(name: str, rows: int | None = None) -> RunConfig:
    """The configuration that results from reading the text of an import."""
    file = next(path for path in FILES if path.stem == name)
    system, found = import_file(file, None, rows)
    return parse_config(yaml.safe_load(text_of(found, system.title, file.name)), file.name)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_published_file_is_recognised_and_loads(file: Path) -> None:
    system, found = import_file(file)
    assert system.name == file.stem.partition("_")[0]
    text = text_of(found, system.title, file.name)
    parse_config(yaml.safe_load(text), file.name)
    assert "unknown to this importer" not in text


@pytest.mark.parametrize(
    ("program", "is_said"),
    [
        ("recipe.flowrl.main_flowrl", True),
        ("openrlhf.cli.train_ppo_ray_of_ours", False),
        ("recipe.dapo.main_dapo", False),
        ("verl.trainer.main_ppo", False),
        ("verl/trainer/main_ppo.py", False),
    ],
)
def test_the_trainer_of_a_recipe_is_said_first(program: str, is_said: bool, tmp_path: Path) -> None:
    start = program if program.endswith(".py") else f"-m {program}"
    options = "--pretrain m --prompt_data d" if "openrlhf" in program else "algorithm.adv_estimator=grpo data.max_prompt_length=8"
    (tmp_path / "run.sh").write_text(f"python3 {start} {options}")
    first = next(iter(import_file(tmp_path / "run.sh")[1].lost), None)
    assert (first is not None and first.key == program) == is_said


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_every_key_is_in_the_text(file: Path) -> None:
    """As the origin of one of our keys, or in one of the lists at the end; written as the file or as the system's newer names."""
    system, found = import_file(file)
    lines = text_of(found, system.title, file.name).splitlines()
    comments = [line.partition("# ")[2] for line in lines]
    for key in read_file(file).values:
        last = key.rpartition(".")[2]
        assert any(last in comment for comment in comments) or f"{key}:" in "\n".join(lines) or renamed(key, comments), key


def renamed(key: str, comments: list[str]) -> bool:
    return key in RENAMED and any(RENAMED[key] in comment for comment in comments)


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_a_table_names_our_keys_and_knows_its_own_defaults(system: Any) -> None:
    known = {*known_keys(RunConfig), "algorithm.loss", "algorithm.kl", "trainer.optimizer", "algorithm.shaping.overlong"}
    for rule in system.rules:
        for target in filter(None, rule.target.split(" and ")):
            assert target in known, rule
        assert rule.target or rule.note, rule
    for key in system.defaults:
        assert system.rules_of(key), key
    exact = [(rule.key, rule.target) for rule in system.rules]
    assert len(exact) == len(set(exact))


def test_verl_grpo() -> None:
    run = imported("verl_grpo", rows=7473)
    assert run.iterations == 105  # 15 passes of 7 whole steps of 1024 prompts: verl drops the rest of 7473 rows
    assert (run.groups_per_iteration, run.group_size, run.algorithm.minibatches) == (1024, 5, 4)
    assert run.algorithm.preset == "grpo" and run.algorithm.kl == Kl(place="loss", estimator="k3", coef=0.001)
    assert (run.algorithm.loss, run.algorithm.aggregation) == (Clip(low=0.2, high=0.2, dual=3.0), "token-mean")
    assert (run.rollout.max_model_len, run.rollout.tensor_parallel, run.rollout.replicas) == (1536, 2, 4)
    assert (run.trainer.optimizer.lr, run.trainer.save_interval, run.eval_interval) == (1e-6, 20, 5)
    assert run.data.overlong == "filter" and run.data.label_key == "reward_model.ground_truth"
    assert [tracker.kind for tracker in run.trackers] == ["wandb"] and run.device == "cuda"
    assert run.placement == "colocated"


def test_verl_ppo() -> None:
    run = imported("verl_ppo")
    assert run.algorithm.advantage == Gae(lam=0.95, value_clip=0.5) and run.algorithm.epochs == 2
    assert run.algorithm.kl is not None and run.algorithm.kl.place == "reward"
    assert run.algorithm.kl.adaptive is not None and run.algorithm.kl.adaptive.target == 0.1
    assert run.algorithm.loss == Clip(low=0.2, high=0.28, dual=3.0)
    assert run.trainer.critic.optimizer is not None and run.trainer.critic.optimizer.lr == 1e-5
    assert run.trainer.critic.warmup_iterations == 20 and run.trainer.micro_batch_tokens == 16384
    assert run.reward is not None and run.reward.rewards[0].function == "compute_score"
    assert (run.trainer.save_interval, run.eval_interval, run.data.overlong) == (0, 0, "error")


def test_mindspeed_ppo() -> None:
    run = imported("mindspeed_ppo")
    assert (run.iterations, run.groups_per_iteration, run.group_size, run.algorithm.minibatches) == (20000, 64, 16, 1)
    assert run.algorithm.advantage == Gae(gamma=1.0, lam=1.0, value_clip=0.5) and run.algorithm.kl is None
    assert (run.trainer.parallel.tensor, run.trainer.parallel.data, run.rollout.replicas) == (8, 2, 2)
    assert run.trainer.critic.optimizer is not None and run.trainer.critic.optimizer.beta2 == 0.95
    assert (run.device, run.data.shuffle, run.data.prompt_key, run.data.label_key) == ("npu", False, "input_ids", "labels")
    assert run.placement == "colocated"


def test_mindspeed_saves_of_actor_and_critic_in_one_path_are_reported() -> None:
    """Its example has the same path for both."""
    _, found = import_file(next(path for path in FILES if path.stem == "mindspeed_ppo"))
    [note] = [entry.note for entry in found.idle if entry.key == "critic_config.save"]
    assert "mixes the files" in note and "polyreme convert" in note


def test_mindspeed_multiplies_its_mini_batches_by_the_samples_of_a_prompt() -> None:
    run = imported("mindspeed_grpo")
    assert run.algorithm.minibatches == 4  # 64 prompts in mini-batches of 16 prompts: the factor of 16 samples is on both sides
    assert run.algorithm.kl == Kl(place="loss", estimator="k3", coef=0.001) and run.seed == 1
    assert run.reward is not None
    assert [(reward.name, reward.weight) for reward in run.reward.rewards] == [("math", 1.0), ("think_format", 0.5)]
    assert (run.trainer.parallel.tensor, run.trainer.parallel.pipeline, run.trainer.parallel.data) == (4, 4, 1)


def test_mindspeed_partial_rollouts_and_context_ranks(tmp_path: Path) -> None:
    source = next(path for path in FILES if path.stem == "mindspeed_grpo")
    tree = yaml.safe_load(source.read_text())
    tree["rl_config"]["partial_rollout_max_split"] = 3
    tree["actor_config"] |= {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(tree))
    system, found = import_file(tmp_path / "grpo.yaml")
    run = parse_config(yaml.safe_load(text_of(found, system.title, "grpo.yaml")), "grpo.yaml")
    assert (run.max_staleness, run.rollout.tokens_per_iteration) == (2, -(-run.rollout.max_new_tokens // 3))
    assert run.trainer.parallel.layout == "tensor 4 x pipeline 2 x context 2 x data 1"


def test_trl() -> None:
    run = imported("trl_grpo", rows=72_441)
    assert (run.groups_per_iteration, run.group_size) == (256, 7)  # 16 x 7 processes x 16 steps = 1792 completions
    assert run.iterations == 282 and run.algorithm.kl is None and run.algorithm.minibatches == 1
    assert (run.trainer.optimizer.lr, run.trainer.optimizer.schedule, run.seed) == (2e-5, "cosine", 42)


def test_trl_counts_optimizer_steps(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(
        "{model_name_or_path: m, dataset_name: d, num_generations: 4, per_device_train_batch_size: 8, gradient_accumulation_steps: 2,"
        " steps_per_generation: 8, num_iterations: 2, max_steps: 800, reward_funcs: [my.rewards.short], beta: 0.1}"
    )
    _, found = import_file(tmp_path / "grpo.yaml")
    assert found.values["groups_per_iteration"] == 16 and found.values["algorithm.minibatches"] == 4
    assert found.values["iterations"] == 100  # 4 mini-batches x 2 passes are 8 optimizer steps
    assert found.values["reward.rewards"] == [{"name": "short", "module": "my.rewards", "function": "short", "weight": 1.0}]
    assert found.values["algorithm.kl.coef"] == 0.1


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ("verl", "{actor_rollout_ref: {model: {lora_rank: 8, lora_alpha: 24}}}"),
        ("openrlhf", "{ds: {lora: {rank: 8, alpha: 24}}}"),
        ("trl", "{model_name_or_path: m, use_peft: true, lora_r: 8, lora_alpha: 24}"),
    ],
)
def test_adapters(system: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    _, found = import_file(tmp_path / "run.yaml", system)
    assert (found.values["trainer.lora.rank"], found.values["trainer.lora.alpha"]) == (8, 24)


def test_openrlhf_counts_samples_in_its_training_batch() -> None:
    flat, dotted = imported("openrlhf_ppo"), imported("openrlhf_dotted")
    assert (flat.groups_per_iteration, flat.group_size, flat.algorithm.minibatches) == (1024, 1, 8)
    assert (flat.placement, dotted.placement) == ("colocated", "separate")
    assert flat.algorithm.preset == "ppo" and flat.algorithm.kl == Kl(place="reward", estimator="k1", coef=0.01)
    assert (flat.trainer.optimizer.beta2, flat.trainer.optimizer.schedule) == (0.95, "cosine")
    assert flat.reward is not None and flat.reward.rewards[0].model is not None
    assert (dotted.groups_per_iteration, dotted.group_size, dotted.algorithm.minibatches) == (128, 8, 1)
    assert dotted.algorithm.loss == Clip(low=0.2, high=0.27) and dotted.max_staleness == 1
    assert (dotted.data.max_prompt_tokens, dotted.rollout.max_new_tokens) == (2048, 6144)
    assert dotted.reward is not None and dotted.reward.rewards[0].function == "reward_func"


def test_paddlenlp() -> None:
    grpo, ppo = imported("paddlenlp_grpo"), imported("paddlenlp_ppo")
    assert (grpo.iterations, grpo.groups_per_iteration, grpo.group_size, grpo.algorithm.minibatches) == (3600, 64, 8, 1)
    assert grpo.reward is not None and grpo.reward.rewards[0].protocol == "paddlenlp"
    assert grpo.algorithm.kl == Kl(place="loss", estimator="k3", coef=0.001)
    assert (grpo.data.prompt_key, grpo.data.label_key, grpo.data.template) == ("src", "tgt", "none")
    assert (ppo.groups_per_iteration, ppo.algorithm.minibatches, ppo.algorithm.kl) == (256, 4, None)
    assert ppo.trainer.critic.optimizer is not None and ppo.trainer.critic.optimizer.lr == 1e-5
    assert isinstance(ppo.algorithm.advantage, Gae) and ppo.algorithm.advantage.value_clip == 0.5


def test_what_is_no_configuration(tmp_path: Path) -> None:
    for name, text in (("a.yaml", "[1]"), ("b.yaml", "a: ["), ("c.sh", "echo nothing"), ("d.yaml", "{unheard: 1, of: 2}")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=name):
            import_file(tmp_path / name)
    with pytest.raises(ConfigError, match="missing"):
        import_file(tmp_path / "missing.yaml")
    _, found = import_file(tmp_path / "d.yaml", "verl")
    assert [(entry.key, entry.fate) for entry in found.lost] == [("unheard", Fate.UNKNOWN), ("of", Fate.UNKNOWN)]


def test_the_guide_shows_what_an_import_writes() -> None:
    guide = Path(__file__).resolve().parents[3] / "docs" / "import.md"
    block = guide.read_text().partition("```yaml file=part.yaml\n")[2].partition("```")[0]
    system, found = import_file(next(path for path in FILES if path.stem == "verl_grpo"))
    assert set(block.splitlines()) <= set(text_of(found, system.title, "run.sh").splitlines())


@pytest.mark.parametrize(
    ("system", "values", "wanted"),
    [
        (
            "verl",
            {
                "reward_model.overlong_buffer.enable": True,
                "reward_model.overlong_buffer.len": 128,
                "data.max_response_length": 512,
            },
            {"algorithm.shaping.overlong.buffer": 0.25, "algorithm.shaping.overlong.factor": 1.0},
        ),
        ("verl", {"actor_rollout_ref.model.enable_gradient_checkpointing": True}, {"trainer.recompute": "full"}),
        ("verl", {"actor_rollout_ref.rollout.val_kwargs.n": 4}, {"eval_answers": 4}),
        ("verl", {"actor_rollout_ref.rollout.val_kwargs.temperature": 0}, {"eval_temperature": None}),
        ("verl", {"actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": 2}, {"trainer.parallel.pipeline": 2}),
        ("openrlhf", {"eval.n_samples_per_prompt": 4, "eval.temperature": 0.6}, {"eval_answers": 4, "eval_temperature": 0.6}),
        (
            "openrlhf",
            {"reward.overlong_buffer_len": 256, "rollout.max_new_tokens": 1024, "reward.overlong_penalty_factor": 2},
            {"algorithm.shaping.overlong.buffer": 0.25, "algorithm.shaping.overlong.factor": 2},
        ),
        ("openrlhf", {"actor.aux_loss_coef": 0}, {"trainer.moe.aux_loss_coef": None}),
        ("trl", {"gradient_checkpointing": True, "num_generations_eval": 2}, {"trainer.recompute": "full", "eval_answers": 2}),
        (
            "mindspeed",
            {"actor_config.recompute_granularity": "selective", "megatron_training.moe_aux_loss_coeff": 0.01},
            {"trainer.recompute": "selective", "trainer.moe.aux_loss_coef": 0.01},
        ),
        ("paddlenlp", {"recompute": 1, "recompute_granularity": "core_attn"}, {"trainer.recompute": "selective"}),
        (
            "paddlenlp",
            {"enable_overlong_reward_buffer": True, "max_dec_len": 1024},
            {"algorithm.shaping.overlong.buffer": 0.25, "algorithm.shaping.overlong.factor": 1.0},
        ),
        ("paddlenlp", {"early_stopping": True}, {"eval_stop_after": 4}),
    ],
)
def test_what_has_a_counterpart_is_translated(system: str, values: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = apply(SYSTEMS[system], values).values
    assert {key: found.get(key) for key in wanted} == wanted
