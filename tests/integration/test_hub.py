"""Models and data by name, through the real clients `huggingface_hub` and `datasets` against a hub on loopback.

The clients read their settings when they are imported, so each command is a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from polyreme.config.load import load_any
from polyreme.hub.simulated_hub import SimulatedHub
from support.whole_run import make_task

CARD = b"""---
configs:
- config_name: main
  data_files: [{split: train, path: main/train.jsonl}, {split: test, path: main/test-*.jsonl}]
- config_name: small
  data_files: [{split: train, path: small.jsonl}]
---
"""
BY_NAME = """
iterations: 2
groups_per_iteration: 4
group_size: 2
eval_sets: [{name: again, data: [{path: acme/digits, config: main, split: test}], samples: 4}]
model: {path: acme/tiny}
data: {train: acme/digits, config: main, eval: acme/digits, max_prompt_tokens: 16}
rollout: {max_new_tokens: 4, max_model_len: 32}
reward: {rewards: [{name: exact}]}
algorithm: {preset: ppo}
trainer:
  optimizer: {lr: 1.0e-3}
  critic: {path: acme/tiny@main}
  sft: [{data: acme/answers, steps: 2, batch_size: 4, lr: 1.0e-3}]
"""
STAGE = """
stage: sft
model: {path: acme/tiny}
data: {train: acme/answers, max_tokens: 32}
trainer: {optimizer: {lr: 1.0e-3}, batch_size: 4, steps: 2}
"""
START = """
import sys
from pathlib import Path
from polyreme.config.load import load_stage
from polyreme.hub.resolve import resolve_names
from polyreme.rundir.run_directory import open_stage, read_names
from polyreme.rundir.start import claimed
path, resume, *overrides = sys.argv[1:]
config = load_stage(Path(path), overrides, "sft")
config = resolve_names(config, read_names(config.run_dir) if resume == "resume" else ())
with claimed(config, resume == "resume") as start:
    open_stage(start.config, start.existing)
    (start.config.run_dir / "checkpoints" / "step-000001").mkdir(parents=True, exist_ok=True)
    (start.config.run_dir / "checkpoints" / "step-000001" / "file").touch()
print(*(each.revision for each in start.config.names if each.type == "model"))
"""
"""What the command of a stage does before it trains: it prints the model's commit."""


REFUSED = """
import sys
from pathlib import Path
from polyreme.config.load import load_any
from polyreme.errors import ConfigError
from polyreme.hub.resolve import resolve_names
for override in sys.argv[2:]:
    try:
        print("found", *resolve_names(load_any(Path(sys.argv[1]), [override])).names)
    except ConfigError as error:
        print(error)
"""
"""Prints what is found, or the error, for each override."""


class World(NamedTuple):
    """A hub with a task's files, the configuration that names them, and the cache of one user."""

    hub: SimulatedHub
    config: Path
    cache: Path
    model: dict[str, bytes]

    def run(self, *argv: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        settings = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.cache), **environment}
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "POLYREME_"))}
        return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=kept | settings, timeout=600)

    def polyreme(self, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return self.run("-m", "polyreme", *words, **environment)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    task = make_task(tmp_path_factory.mktemp("task")).parent
    folder = tmp_path_factory.mktemp("by-name")
    (folder / "run.yaml").write_text(BY_NAME)
    (folder / "sft.yaml").write_text(STAGE)
    model = {path.name: path.read_bytes() for path in (task / "model").iterdir()}
    train, held_out, answers = ((task / f"{name}.jsonl").read_bytes() for name in ("train", "eval", "sft"))
    with SimulatedHub() as hub:
        hub.commit("models", "acme/tiny", model | {"pytorch_model.bin": b"a pickle"})
        data = {"README.md": CARD, "main/train.jsonl": train, "small.jsonl": train[: train.index(b"\n") + 1]}
        hub.commit("datasets", "acme/digits", data | {"main/test-a.jsonl": held_out, "main/test-b.jsonl": held_out})
        hub.commit("datasets", "acme/answers", {"train.jsonl": answers})
        yield World(hub, folder / "run.yaml", folder / "cache", model)


def test_every_input_may_be_a_name_and_is_fetched_once(world: World, tmp_path: Path) -> None:
    world = world._replace(cache=tmp_path / "cache")
    world.hub.requests.clear()
    done = world.polyreme("config", "check", str(world.config))
    assert done.returncode == 0, done.stderr
    commit = world.hub.find("models", "acme/tiny", None)[0]
    assert f"model          acme/tiny@{commit} in {world.cache.resolve()}" in done.stdout
    assert "(main train) in" in done.stdout and "(main test) in" in done.stdout and "(default train) in" in done.stdout
    files = [request for request in world.hub.requests if request.startswith("GET") and "/resolve/" in request]
    assert len([each for each in files if each.endswith("model.safetensors")]) == 1
    assert not [each for each in files if each.endswith("pytorch_model.bin")]
    checked = world.polyreme("data", "check", "--config", str(world.config))
    assert checked.returncode == 0, checked.stderr
    assert "rows        256" in checked.stdout
    small = world.polyreme("data", "check", "--config", str(world.config), "data.config=small", "data.eval=null", "eval_sets=[]")
    assert "rows        1\n" in small.stdout, small.stderr


def test_without_a_network_the_cache_serves_or_the_error_says_how(world: World, tmp_path: Path) -> None:
    stage, gone = str(world.config.with_name("sft.yaml")), {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert world.polyreme("config", "check", stage).returncode == 0
    for without, found in ((gone, "Connect"), (gone | {"HF_HUB_OFFLINE": "1"}, "offline mode (HF_HUB_OFFLINE)")):
        served = world.polyreme("config", "check", stage, **without)
        assert served.returncode == 0, served.stderr
        failed = world.polyreme("config", "check", stage, HF_HOME=str(tmp_path), **without)
        assert failed.returncode == 2
        assert "expected a local path, or a model at http://127.0.0.1:9, called acme/tiny (model.path)" in failed.stderr
        assert found in failed.stderr and str(tmp_path) in failed.stderr


def test_an_unknown_name_part_or_revision_is_explained(world: World) -> None:
    full = world.hub.commit("datasets", "acme/emptied", {"train.jsonl": b'{"prompt": "a", "response": "b"}\n'})
    world.hub.commit("datasets", "acme/emptied", {"README.md": b"moved"})
    expected = {
        f"data={{train: acme/emptied@{full}}}": "found acme/tiny@",
        "data={train: acme/emptied}": "only a copy of the commit " + full,
        "data={train: acme/digits}": "['main', 'small']. Name one in the key `config`",
        "data={train: acme/digits, config: main, split: dev}": "found the splits train, test",
        "data={train: acme/none}": "a data set at",
        "model.path=acme/none": "found neither a file nor such a repository. Fix model.path, or set HF_TOKEN",
        "model.path=acme/tiny@v9": "found no such revision",
    }
    done = world.run("-c", REFUSED, str(world.config.with_name("sft.yaml")), *expected)
    assert done.returncode == 0, done.stderr
    for line, message in zip(done.stdout.splitlines(), expected.values(), strict=True):
        assert message in line


def test_a_resume_keeps_the_commit_that_its_run_started_with(world: World) -> None:
    stage = str(world.config.with_name("sft.yaml"))
    first = world.run("-c", START, stage, "new")
    assert first.returncode == 0, first.stderr
    before = world.hub.find("models", "acme/tiny", None)[0]
    after = world.hub.commit("models", "acme/tiny", world.model | {"generation_config.json": b'{"top_k": 1}'})
    resumed = world.run("-c", START, stage, "resume", HF_HUB_OFFLINE="1")
    moved = world.run("-c", START, stage, "resume", HF_HOME=str(world.cache.with_name("other cache")))
    assert [each.stdout.split() for each in (first, resumed, moved)] == [[before]] * 3, moved.stderr
    assert world.run("-c", START, stage, "new", "name=second").stdout.split() == [after]
    changed = world.run("-c", START, stage, "resume", f"model.path=acme/tiny@{after}")
    assert "other values of model.path" in changed.stderr
    recorded = load_any(world.config.parent / "runs" / "run" / "config.yaml")
    assert {(each.type, each.name, each.revision) for each in recorded.names} >= {("model", "acme/tiny", before)}
    assert json.dumps(recorded.by_name(recorded.model_dump(mode="json"))).count(f"acme/tiny@{before}") == 1


def test_init_writes_names_and_its_run_can_start(world: World, tmp_path: Path) -> None:
    words = ("--model", "acme/tiny", "--data", "acme/digits", "--data-config", "main", "--reward", "exact", "--device", "cpu")
    made = world.polyreme("init", str(tmp_path / "new"), "--name", "new", *words)
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "new" / "run.yaml").read_text()
    assert "path: acme/tiny" in text and text.count("{path: acme/digits, config: main, split: [") == 2
    checked = world.polyreme("config", "check", str(tmp_path / "new" / "run.yaml"))
    assert checked.returncode == 0, checked.stderr


@pytest.mark.real
def test_adapters_name_the_commit_of_their_base(world: World) -> None:
    stage = str(world.config.with_name("sft.yaml"))
    done = world.polyreme("sft", stage, "name=adapters", "trainer.lora={rank: 2}", "trainer.parallel={threads: 1}")
    assert done.returncode == 0, done.stderr
    config = json.loads(
        (world.config.parent / "runs" / "adapters" / "hf" / "final" / "adapter" / "adapter_config.json").read_text()
    )
    assert (config["base_model_name_or_path"], config["revision"]) == (
        "acme/tiny",
        world.hub.find("models", "acme/tiny", None)[0],
    )
