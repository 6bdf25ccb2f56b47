"""The configuration: every mistake is an actionable error, and exactly the fields that decide the weights decide the fingerprint."""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from polyreme.config.load import load_config, load_reward_config, parse_config
from polyreme.config.recipes.algorithm import AlgorithmConfig
from polyreme.config.recipes.presets import PRESETS
from polyreme.config.recipes.recipe import TokenTis
from polyreme.config.run import RunConfig
from polyreme.config.section import known_keys
from polyreme.dataset.source import as_sources
from polyreme.errors import ConfigError
from support.configs import algorithm, run_config


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    return yaml.safe_load(run_config(tmp_path).to_yaml())


def written(tmp_path: Path, tree: dict[str, Any]) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_written_configuration_reads_back(tmp_path: Path) -> None:
    config = run_config(tmp_path, seed=3)
    assert load_config(written(tmp_path, yaml.safe_load(config.to_yaml()))) == config


DISTILLATION: dict[str, Any] = {"algorithm": {"preset": "distillation"}, "teacher": {"url": "http://t:8000/v1/"}}


def test_shared_devices_exclude_staleness_and_decide_no_weights(tree: dict[str, Any], tmp_path: Path) -> None:
    shared = load_config(written(tmp_path, {**tree, "placement": "colocated"}))
    assert shared.fingerprint() == run_config(tmp_path).fingerprint()
    with pytest.raises(ConfigError, match="max_staleness = 1"):
        load_config(written(tmp_path, {**tree, "placement": "colocated", "max_staleness": 1}))


def test_an_engine_ends_for_training_only_on_cpu(tree: dict[str, Any], tmp_path: Path) -> None:
    changed = {**tree, "rollout": {**tree["rollout"], "cpu_sleep": "end"}}
    for placement in ("separate", "colocated"):
        config = load_config(written(tmp_path, {**changed, "placement": placement}))
        assert config.ends_engines == (placement == "colocated")
        assert config.fingerprint() == run_config(tmp_path).fingerprint()
    with pytest.raises(ConfigError, match=r"rollout\.cpu_sleep"):
        load_config(written(tmp_path, {**changed, "device": "cuda"}))


def test_orchestrators_decide_no_weights_and_need_something_to_share(tree: dict[str, Any], tmp_path: Path) -> None:
    def config(count: int, **sections: Any) -> RunConfig:
        trainer = {**tree["trainer"], "orchestrators": count}
        return load_config(written(tmp_path, {**tree, "trainer": trainer, **sections}))

    assert config(3).fingerprint() == run_config(tmp_path).fingerprint()
    with pytest.raises(ConfigError, match=r"trainer\.orchestrators = 3 exceeds rollout\.max_num_seqs = 2"):
        config(3, rollout={**tree["rollout"], "max_num_seqs": 2})
    sessions: dict[str, Any] = {"reward": None, "environment": {"online": {}}, "max_staleness": 1}
    assert config(1, **sessions).environment
    with pytest.raises(ConfigError, match=r"does not go with trainer\.orchestrators above 1"):
        config(2, **sessions)


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_a_token_budget_must_let_the_longest_response_end_within_its_bound(
    tree: dict[str, Any], tmp_path: Path, placement: str
) -> None:
    longest = tree["rollout"]["max_new_tokens"]
    half = -(-longest // 2)

    def config(budget: int, staleness: int) -> RunConfig:
        rollout = {**tree["rollout"], "tokens_per_iteration": budget}
        return load_config(written(tmp_path, {**tree, "placement": placement, "max_staleness": staleness, "rollout": rollout}))

    assert config(half, 1).rollout.tokens_per_iteration == half
    for budget, staleness in ((half - 1, 1), (half, 0), (longest, 1)):
        with pytest.raises(ConfigError, match=r"rollout\.tokens_per_iteration"):
            config(budget, staleness)


def test_carried_samples_on_shared_devices_leave_no_time_for_evaluations(tree: dict[str, Any], tmp_path: Path) -> None:
    rollout = {**tree["rollout"], "tokens_per_iteration": -(-tree["rollout"]["max_new_tokens"] // 2)}
    tree["data"]["eval"] = tree["data"]["train"]
    carried = {**tree, "max_staleness": 1, "rollout": rollout}
    assert load_config(written(tmp_path, carried)).holds_versions
    with pytest.raises(ConfigError, match="evaluations"):
        load_config(written(tmp_path, {**carried, "placement": "colocated"}))


def test_a_distillation_needs_no_reward(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["data"]["eval"] = None
    config = load_config(written(tmp_path, {**tree, **DISTILLATION, "reward": None}))
    assert config.reward is None and config.teacher is not None
    assert (config.teacher.urls, config.recipe.teacher_coef) == (["http://t:8000/v1"], 1.0)
    assert load_config(written(tmp_path, yaml.safe_load(config.to_yaml()))) == config
    with pytest.raises(ConfigError, match="reward"):
        load_reward_config(tmp_path / "run.yaml")


def test_a_teacher_may_stand_beside_rewards(tree: dict[str, Any], tmp_path: Path) -> None:
    beside = {"algorithm": {"preset": "grpo", "teacher_coef": 0.1}, "teacher": DISTILLATION["teacher"]}
    assert load_config(written(tmp_path, {**tree, **beside})).reward is not None


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"rollout.temperature": 0.7}, "rollout.temperature"),
        ({"data.eval": "held_out.jsonl"}, "data.eval and eval_sets need the section `reward` or `environment`"),
    ],
)
def test_a_distillation_refuses_what_makes_no_sense_with_it(
    tree: dict[str, Any], tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    tree["data"]["eval"] = None
    overrides = [f"{name}={value}" for name, value in changes.items()]
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, {**tree, **DISTILLATION, "reward": None}), overrides)
    assert found in caught.value.found


def test_where_the_teacher_is_does_not_decide_the_weights(tree: dict[str, Any], tmp_path: Path) -> None:
    first, moved, other = (
        load_config(written(tmp_path, {**tree, **DISTILLATION}), overrides).fingerprint()
        for overrides in ([], ["teacher.url=https://else/v1", "teacher.timeout=9"], ["teacher.model=large"])
    )
    assert first == moved != other


@pytest.mark.parametrize(
    ("place", "wrong", "right"),
    [
        ((), "iteration", "iterations"),
        (("trainer", "optimizer"), "betas2", "trainer.optimizer.beta2"),
        (("rollout",), "temprature", "rollout.temperature"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(
    tree: dict[str, Any], tmp_path: Path, place: tuple[str, ...], wrong: str, right: str
) -> None:
    node = tree
    for name in place:
        node = node[name]
    node[wrong] = 1
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, tree))
    assert caught.value.found.startswith(f"unknown key {'.'.join((*place, wrong))} ")
    assert right in caught.value.found


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("trainer.optimizer.lr=-1", "greater than 0, found -1"),
        ("group_size=1", "group_size 1"),
        ("data.max_prompt_tokens=60", "rollout.max_model_len"),
        ("trainer.optimizer.min_lr=1", "trainer.optimizer.min_lr"),
        ("trainer.parallel={tensor: 2, data: 3, nodes: 2}", "`nodes` = 2"),
        ("trainer.parallel={tensor: 4, nodes: 2}", "`nodes` = 2"),
        ("trainer.parallel={data: 2, context: 2, nodes: 2, expert: 3}", "`expert` = 3"),
        ("trainer.parallel={pipeline: 3, data: 2, nodes: 2}", "`pipeline` = 3"),
        ("trainer.parallel={virtual_pipeline: 2}", "`virtual_pipeline` = 2"),
        ("trainer.parallel={data: 3, expert: 2}", "`expert` = 2"),
        ("trainer.parallel={data: 3, expert_tensor: 2}", "`expert` x `expert_tensor` = 2 must divide the 3 ranks"),
        ("trainer.parallel={tensor: 2, data: 3, expert: 3, expert_tensor: 1}", "one must divide the other"),
        ("trainer.parallel={data: 4, expert: 3, nodes: 2}", "`expert` = 3"),
        ("name=No Spaces", "name"),
        ("trainer.optimizer.lr=.inf", "finite number"),
        ("rollout.temperature=0.001", "0.01"),
        ("rollout.temperature=3", "less than or equal to 2"),
        ("seed=-5", "greater than or equal to 0"),
        ("algorithm.teacher_coef=1", "set the section `teacher`"),
        ("teacher={url: 'http://t/v1'}", "set algorithm.teacher_coef"),
        ("teacher={url: 't:8000'}", "teacher.url"),
        ("reward=null", "the section `reward` is missing, from which algorithm.advantage"),
        ("algorithm.minibatches=5", "algorithm.minibatches = 5"),
        ("iterations", "'iterations'"),
        ("=3", "'=3'"),
    ],
)
def test_an_invalid_value_is_an_error_that_shows_it(tree: dict[str, Any], tmp_path: Path, override: str, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, tree), [override])
    assert found in caught.value.found


PATHS = [
    "output_dir",
    "model.path",
    "data.train",
    "data.eval",
    "trainer.critic.path",
    "reward.rewards.0.file",
    "algorithm.source.file",
]
PLAIN = [
    "data.system",
    "security.token_env",
    "algorithm.preset",
    "seed",
    "rollout.replicas",
    "data.max_prompt_tokens",
    "eval_best",
]


@pytest.mark.parametrize("key", PATHS + PLAIN)
def test_no_key_takes_what_no_record_or_file_name_holds(tree: dict[str, Any], tmp_path: Path, key: str) -> None:
    file, absurd = (
        written(tmp_path, tree),
        ['"a\\0b"', '"a\\ud800b"', "1" + 22 * "0", *([300 * "x", 2500 * "x/"] if key in PATHS else ())],
    )
    for value in absurd:
        with pytest.raises(ConfigError):
            load_config(file, [f"{key}={value}"])


def test_a_path_below_an_unknown_home_is_an_ordinary_path(tree: dict[str, Any], tmp_path: Path) -> None:
    config = load_config(written(tmp_path, tree), ["output_dir=~nobody-has-this-name/runs"])
    assert config.output_dir == Path.cwd() / "~nobody-has-this-name/runs"


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("name=nan", lambda c: c.name, "nan"),
        ("trainer.optimizer.lr=1e-4", lambda c: c.trainer.optimizer.lr, 1e-4),
        ("rollout.replicas=3", lambda c: c.rollout.replicas, 3),
        ("reward.rewards.0.weight=0.5", lambda c: c.reward.rewards[0].weight, 0.5),
        ("algorithm={preset: dapo}", lambda c: c.algorithm.loss.high, 0.28),
        ("algorithm={preset: ppo, kl: {coef: 0.1}}", lambda c: (c.algorithm.kl.coef, c.algorithm.kl.estimator), (0.1, "k1")),
        ("algorithm.loss.high=0.3", lambda c: (c.algorithm.loss.high, c.algorithm.loss.low), (0.3, 0.2)),
        ("data.system=Add.", lambda c: c.data.system, "Add."),
        ("security.token_env=T", lambda c: c.security.token_env, "T"),  # where the file has `security: null`
    ],
)
def test_overrides_are_yaml_values_at_dotted_keys(
    tree: dict[str, Any], tmp_path: Path, override: str, read: Any, value: Any
) -> None:
    assert read(load_config(written(tmp_path, tree), [override])) == value


@pytest.mark.parametrize(
    ("text", "expected"), [("a: [", "YAML"), ("a: 1\n---\nb: 2", "YAML"), ("- 1", "a mapping"), ("", "a mapping")]
)
def test_a_file_that_is_not_a_configuration_is_an_error(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    assert caught.value.expected.startswith(expected) and str(tmp_path / "run.yaml") in str(caught.value)


def test_paths_are_relative_to_the_file_and_overrides_to_the_working_directory(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree["data"]["train"] = "prompts.jsonl"
    del tree["output_dir"]
    path = written(tmp_path, tree)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(path, ["data.eval=held_out.jsonl"])
    assert config.data.train == tmp_path / "prompts.jsonl"
    assert config.data.eval == tmp_path / "elsewhere" / "held_out.jsonl"
    assert config.run_dir == tmp_path / "runs" / "run"


def test_a_name_in_the_file_is_no_path_where_an_override_is(
    tree: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree["model"]["path"] = "owner/model"
    tree["data"]["train"] = [{"path": "owner/data"}]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "elsewhere" / "owner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(tmp_path / "run.yaml", ["iterations=3", "group_size=4"])
    assert (config.model.path, as_sources(config.data.train)[0].path) == (Path("owner/model"), Path("owner/data"))
    here = load_config(tmp_path / "run.yaml", ["model.path=owner/model", "iterations=3"])
    assert here.model.path == tmp_path / "elsewhere" / "owner" / "model"


def test_a_reward_has_one_source(tree: dict[str, Any]) -> None:
    tree["reward"]["rewards"] = [{"weight": 1.0}]
    with pytest.raises(ConfigError) as caught:
        parse_config(tree, "the test")
    assert caught.value.found.startswith("reward.rewards.0: ")


def test_the_fingerprint_depends_on_what_decides_the_weights(tmp_path: Path) -> None:
    base = run_config(tmp_path)
    same: list[dict[str, Any]] = [
        {"name": "other"},
        {"iterations": 5},
        {"eval_interval": 3},
        {"output_dir": tmp_path / "elsewhere"},
    ]
    other: list[dict[str, Any]] = [{"seed": 1}, {"groups_per_iteration": 5}, {"group_size": 3}, {"max_staleness": 1}]
    assert {base.model_copy(update=change).fingerprint() for change in same} == {base.fingerprint()}
    assert len({base.model_copy(update=change).fingerprint() for change in [{}, *other]}) == len(other) + 1


@pytest.mark.parametrize(("schedule", "decides"), [("constant", False), ("linear", True), ("cosine", True)])
def test_a_runs_length_decides_the_weights_where_the_learning_rate_depends_on_it(
    tree: dict[str, Any], schedule: str, decides: bool
) -> None:
    tree["trainer"]["optimizer"]["schedule"] = schedule
    short = parse_config(tree, "the test")
    long = parse_config({**tree, "iterations": 2 * tree["iterations"]}, "the test")
    assert (short.fingerprint() != long.fingerprint()) is decides


def test_the_layout_of_the_ranks_does_not_decide_the_weights(tree: dict[str, Any]) -> None:
    tree["trainer"]["parallel"] = {"tensor": 2, "data": 4}
    here = parse_config(tree, "the test")
    tree["trainer"]["parallel"]["nodes"] = 4
    spread = parse_config(tree, "the test")
    assert (spread.trainer.parallel.world_size, spread.trainer.parallel.ranks_per_node) == (8, 2)
    tree["trainer"]["parallel"] = {"tensor": 3, "pipeline": 2, "threads": 5}
    other = parse_config(tree, "the test")
    assert other.trainer.parallel.world_size == 6
    tree["trainer"]["parallel"] = {"context": 2, "data": 3, "expert": 6}
    cut = parse_config(tree, "the test")
    assert (cut.trainer.parallel.world_size, cut.trainer.parallel.layout) == (6, "tensor 1 x context 2 x data 3 (expert 6)")
    assert {config.fingerprint() for config in (spread, other, cut)} == {here.fingerprint()}


def test_how_an_endpoint_is_secured_does_not_decide_the_weights(tree: dict[str, Any]) -> None:
    far = {"url": "https://h/", "protocol": "native"}
    prints = []
    for security in (None, {"token_env": "T"}, {"ca": "/ca.pem"}):
        tree["reward"]["rewards"] = [{"name": "exact"}, {**far, "security": security}]
        prints.append(parse_config(tree, "the test").fingerprint())
    assert len(set(prints)) == 1


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz_.", min_size=1, max_size=30))
def test_no_unknown_key_is_accepted(key: str) -> None:
    tree = yaml.safe_load(run_config(Path("/nowhere")).to_yaml())
    if key in RunConfig.model_fields:
        return
    with pytest.raises(ConfigError, match="unknown key"):
        parse_config(tree | {key: 1}, "the test")


def test_off_policy_samples_are_corrected_when_there_may_be_some(tmp_path: Path) -> None:
    token = TokenTis(cap=2.0)
    for staleness, choice, found in [(0, "auto", ()), (1, "auto", (token,)), (0, (token,), (token,)), (4, (), ())]:
        section = algorithm(correction=choice)
        assert run_config(tmp_path, max_staleness=staleness, algorithm=section).recipe.correction == found


def test_in_bfloat16_samples_are_corrected_without_staleness_too(tmp_path: Path) -> None:
    """Engine and learner round differently."""
    model = run_config(tmp_path).model.model_copy(update={"dtype": "bfloat16"})
    assert run_config(tmp_path, model=model, algorithm=algorithm()).recipe.correction == (TokenTis(cap=2.0),)
    bypass = AlgorithmConfig.model_validate({"preset": "dppo_tv"})
    assert run_config(tmp_path, model=model, algorithm=bypass).recipe.correction == ()


def test_a_loss_anchored_at_the_sampling_policy_is_not_corrected_twice(tmp_path: Path) -> None:
    config = run_config(tmp_path, max_staleness=2, algorithm=AlgorithmConfig.model_validate({"preset": "dppo_tv"}))
    assert config.recipe.correction == ()


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_resolved_algorithm_reads_back_as_itself(preset: str) -> None:
    section = AlgorithmConfig.model_validate({"preset": preset})
    assert AlgorithmConfig.model_validate(section.model_dump(mode="json")) == section


def test_the_schema_has_every_key_once() -> None:
    keys = list(known_keys(RunConfig))
    assert len(keys) == len(set(keys))
    assert {"trainer.sft", "trainer.parallel.tensor", "reward.rewards"} <= set(keys)


def test_every_key_is_read() -> None:
    """Some code outside the schema's own validators reads an attribute of each key's name."""
    root = Path(__file__).resolve().parents[3]
    sources = [*(root / "polyreme").rglob("*.py"), *(root / "services").rglob("*.py")]
    nodes = [node for path in sources for node in ast.walk(_without_validators(ast.parse(path.read_text())))]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    attributes |= {name for node in nodes if isinstance(node, ast.MatchClass) for name in node.kwd_attrs}
    losses = ast.parse((root / "services/trainer/polyreme_trainer/algorithms/losses.py").read_text())
    attributes |= {node.arg for node in ast.walk(losses) if isinstance(node, ast.arg)}  # which get a loss's keys by name
    assert [key for key in known_keys(RunConfig) if key.rpartition(".")[2] not in attributes] == []


def _without_validators(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("validator" in ast.unparse(mark) for mark in node.decorator_list):
            node.body = [ast.Pass()]
    return tree


def test_a_critic_that_no_advantage_uses_is_refused(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["trainer"]["critic"] = {"warmup_iterations": 5}
    with pytest.raises(ConfigError) as error:
        load_config(written(tmp_path, {**tree, "algorithm": {"preset": "grpo"}}))
    assert "trainer.critic with advantage group_norm" in error.value.found
    assert "trainer.critic={}" in error.value.found and ".." not in str(error.value)
    load_config(written(tmp_path, {**tree, "algorithm": {"preset": "grpo"}}), ["trainer.critic={}"])
    assert load_config(written(tmp_path, {**tree, "algorithm": {"preset": "ppo"}})).trainer.critic.warmup_iterations == 5


def test_a_critics_schedule_ends_below_its_peak(tree: dict[str, Any], tmp_path: Path) -> None:
    tree["trainer"]["critic"] = {"optimizer": {"lr": 1e-4, "min_lr": 1e-3, "schedule": "cosine"}}
    with pytest.raises(ConfigError, match=r"trainer\.critic\.optimizer\.min_lr"):
        load_config(written(tmp_path, {**tree, "algorithm": {"preset": "ppo"}}))


def test_missing_keys_are_named_with_what_they_contain(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: mine\nmodel: {path: model}\n")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "run.yaml")
    for piece in (
        "data is missing, with data.train",
        "trainer is missing, with trainer.optimizer.lr",
        "groups_per_iteration is missing",
    ):
        assert piece in error.value.found


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "none.yaml")
    assert str(tmp_path / "none.yaml") in raised.value.expected and "polyreme init" in raised.value.do
