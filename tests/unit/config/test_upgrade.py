"""`polyreme upgrade-config`: every key of an older version has a successor, and the upgraded configuration means the same."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.cli.commands.upgrade_config import upgrade_config, upgraded_text
from polyreme.config.load import load_any, parse_config
from polyreme.config.recipes.recipe import GroupMean, GroupNorm, TokenTis
from polyreme.config.run import RunConfig
from polyreme.config.section import known_keys
from polyreme.config.stage import STAGES
from polyreme.config.upgrade import OLD_KEYS
from polyreme.errors import ConfigError

NEW = """# a run
iterations: 1
groups_per_iteration: 1  # prompts
group_size: 2
max_staleness: 1
model: {path: /model}
data: {train: /rows.jsonl}
rollout:
  max_new_tokens: 32  # short
  max_model_len: 2048
reward:
  rewards:
    - {name: exact}  # as written
trainer: {optimizer: {lr: 1.0e-3}}
"""
BEFORE_PRESETS = {
    "preset": "grpo",
    "kl": None,
    "aggregation": "token-mean",
    "advantage": {"kind": "group_norm", "std_floor": 1e-4},
}
VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "rollout.threads": (3, {"rollout.vllm.threads": 3}),
    "rollout.kv_cache_mib": (64, {"rollout.vllm.kv_cache_mib": 64}),
    "rollout.gpu_memory_utilization": (0.5, {"rollout.vllm.gpu_memory_utilization": 0.5}),
    "algorithm.name": ("grpo", {"algorithm.preset": "grpo"}),
    "algorithm.clip_low": (0.1, {"algorithm.loss.low": 0.1}),
    "algorithm.clip_high": (0.3, {"algorithm.loss.high": 0.3}),
    "algorithm.kl_coef": (0.01, {"algorithm.kl.coef": 0.01, "algorithm.kl.place": "loss", "algorithm.kl.estimator": "k3"}),
    "algorithm.normalize_std": (False, {"algorithm.advantage": GroupMean()}),
    "algorithm.importance_sampling": ("none", {"algorithm.correction": ()}),
    "algorithm.importance_cap": (3.0, {"algorithm.correction": (TokenTis(cap=3.0),)}),
    "algorithm.advantage.length_adaptive_alpha": (0.1, {"algorithm.advantage.lam.alpha": 0.1}),
}
"""A value of each old key, and what today's configuration has for it."""


def old(key: str, value: Any, **algorithm: Any) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(NEW) | ({"algorithm": algorithm} if algorithm else {})
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return tree


@pytest.mark.parametrize("key", OLD_KEYS)
def test_an_old_key_names_the_command_that_rewrites_it(key: str, tmp_path: Path) -> None:
    value, expected = VALUES[key]
    gae = {"preset": "ppo", "advantage": {"kind": "gae"}}
    tree = old(key, value, **(gae if key.startswith("algorithm.advantage") else {}))
    with pytest.raises(ConfigError, match=f"old key {key} .`polyreme upgrade-config FILE` rewrites it"):
        parse_config(tree, "the test")
    text, changes = upgraded_text(yaml.safe_dump(tree), "the test")
    assert any(change.startswith(f"{key}: {value} -> ") for change in changes)
    config = parse_config(yaml.safe_load(text), "the test")
    for name, wanted in expected.items():
        found: Any = config
        for part in name.split("."):
            found = getattr(found, part)
        assert found == wanted
    assert upgraded_text(text, "the test") == (text, [])


def test_before_presets_a_run_had_no_kl_and_its_own_floor() -> None:
    text, changes = upgraded_text(yaml.safe_dump(old("rollout.threads", 1)), "the test")
    assert yaml.safe_load(text)["algorithm"] == BEFORE_PRESETS
    assert len(changes) == 5
    config = parse_config(yaml.safe_load(text), "the test")
    assert config.algorithm.kl is None and config.algorithm.advantage == GroupNorm(std_floor=1e-4)


def test_a_file_without_an_old_key_can_keep_the_defaults_of_its_version(tmp_path: Path) -> None:
    (tmp_path / "new.yaml").write_text(upgraded_text(NEW, "f", keep_defaults=True)[0])
    config = load_any(tmp_path / "new.yaml")
    assert isinstance(config, RunConfig) and config.recipe.kl is None
    assert config.recipe.advantage == GroupNorm(std_floor=1e-4)
    stage = "stage: sft\nmodel: {path: /model}\n"
    for later in (stage, NEW + "algorithm: {preset: ppo}\n"):  # 0.1.0 had neither
        assert upgraded_text(later, "f", keep_defaults=True)[1] == []


def test_importance_weights_of_samples_that_are_never_stale_stay_automatic() -> None:
    tree = old("algorithm.importance_cap", 3.0) | {"max_staleness": 0}
    assert yaml.safe_load(upgraded_text(yaml.safe_dump(tree), "the test")[0])["algorithm"]["correction"] == "auto"
    tree = old("algorithm.importance_sampling", "token", importance_cap=4.0)
    [correction] = yaml.safe_load(upgraded_text(yaml.safe_dump(tree), "the test")[0])["algorithm"]["correction"]
    assert correction == {"kind": "token_tis", "cap": 4.0}


def test_comments_and_order_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    file.write_text(NEW.replace("  max_model_len: 2048\n", "  max_model_len: 2048\n  threads: 2  # one per core\n"))
    upgrade_config(file, new)
    assert "rollout.threads: 2 -> rollout.vllm.threads: 2" in capsys.readouterr().err
    kept = [line for line in NEW.splitlines() if not line.startswith("trainer")]
    assert [line for line in new.read_text().splitlines() if line in kept] == kept
    assert re.search(r"\n    threads: 2 +# one per core\n", new.read_text())
    assert load_any(new).rollout.vllm.threads == 2  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"no file .*new\.yaml yet"):
        upgrade_config(file, new)


def test_a_current_file_is_printed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(NEW)
    upgrade_config(tmp_path / "run.yaml")
    printed = capsys.readouterr()
    assert printed.out == NEW and "no key of an older version" in printed.err
    (tmp_path / "run.yaml").write_text(NEW + "nonsense: 1\n")
    with pytest.raises(ConfigError, match="unknown key nonsense"):
        upgrade_config(tmp_path / "run.yaml")


def test_every_released_key_is_known_or_has_a_successor() -> None:
    """A key that goes gets a line in OLD_KEYS. A release adds its keys to the list."""
    today = {*known_keys(RunConfig), *(key for stage in STAGES.values() for key in known_keys(stage))}
    released = [
        line for line in Path(__file__).with_name("released_keys.txt").read_text().splitlines() if not line.startswith("#")
    ]
    assert len(released) > 70
    assert [key for key in released if key not in today and key not in OLD_KEYS] == []
    assert not set(OLD_KEYS) & today and set(VALUES) == set(OLD_KEYS)
