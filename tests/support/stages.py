"""Stages for tests: configurations, rows, a rank that dies at a given record, and an engine whose weights are a digest of its steps."""

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.config.load import parse
from polyreme.config.stage import STAGES, StageConfig
from polyreme.experience.metric_records import MetricRecord, fields_of
from polyreme.rundir.run_directory import open_stage, read_run_file, read_stage_config
from polyreme_trainer.algorithms.metrics import combine, finish
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.engine import STEP, RowsLoss, Saved
from polyreme_trainer.learner.gates import Gate
from polyreme_trainer.learner.leader import Ranks
from support.models import tiny_family_model
from support.tiny_tokenizer import model_files


def stage_config(folder: Path, stage: str, **changes: Any) -> StageConfig:
    """A stage on `rows.jsonl` and `model` in `folder`: six steps of four rows, saved and evaluated every second one.

    `changes`: dotted keys, written with `__` instead of a dot.
    """
    tree: dict[str, Any] = {
        "stage": stage,
        "name": stage,
        "output_dir": str(folder / "runs"),
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "rows.jsonl"), "eval": str(folder / "held_out.jsonl"), "max_tokens": 64},
        "trainer": {"optimizer": {"lr": 1e-2}, "batch_size": 4, "steps": 6, "save_interval": 2, "eval_interval": 2},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return parse(tree, "the test", STAGES[stage])


def write_data(folder: Path, rows: int = 22) -> None:
    """Rows that every stage can read, of uneven lengths."""
    for name, first in (("rows", 0), ("held_out", 100)):
        lines = [
            {
                "prompt": f"{first + row}+{row}=",
                "response": "a" * (1 + row % 5),
                "chosen": "a" * (1 + row % 5),
                "rejected": "zyx" * (1 + row % 3),
                "label": row % 3 > 0,
                "margin": 0.1 * (row % 4),
                "tie": row % 7 == 3,
            }
            for row in range(rows)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_model(folder: Path, model_type: str = "qwen2", layers: int = 2) -> Path:
    """A tiny model (tied embeddings, grouped-query attention, 49 tokens) with the tiny tokenizer."""
    fields = {"vocab_size": 49, "head_dim": 8, "eos_token_id": 1, "bos_token_id": 2, "num_hidden_layers": layers}
    path = tiny_family_model(model_type, folder / "model", **fields)
    for name, content in model_files().items():
        if name != "config.json":
            (path / name).write_bytes(content)
    return path


def prepared(config: StageConfig) -> Path:
    """The stage's run directory, as its command makes it."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    open_stage(config, read_run_file(config.run_dir))
    return config.run_dir


class Recorded:
    """Collects records in memory. From record number `until` on, it asks the stage to stop."""

    def __init__(self, until: int | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self.until = until

    def write(self, record: MetricRecord) -> None:
        self.records.append(fields_of(record))

    def drains(self) -> bool:
        return self.until is not None and len(self.records) >= self.until


class DigestEngine:
    """A StageEngine whose weights are a SHA-256 chain over its steps' rows, so they prove what was trained, and in which order.

    A save is complete when it is polled for the second time, or waited for.

    Args:
        losses: the held-out loss after each step; the number of held-out tokens by default.
    """

    def __init__(self, config: StageConfig, losses: Mapping[int, float] | None = None) -> None:
        self.root, self.weights = config.run_dir / "checkpoints", ""
        self.facts: Mapping[str, Any] = {}
        self.losses, self.number = losses, 0
        self.saves: list[tuple[int, str, Mapping[str, Any], Path | None]] = []
        self.polls = 0

    def load(self) -> int:
        found = sorted(self.root.glob("step-*.json"))
        if not found:
            return 0
        saved = json.loads(found[-1].read_text())
        self.weights, self.facts = saved["weights"], saved["facts"]
        self.number = int(found[-1].stem.removeprefix("step-"))
        return self.number

    longest = 64

    def forward(self, role: str, rows: StageRows) -> np.ndarray:
        return np.zeros(sum(len(ids) - 1 for ids in rows.ids), dtype=np.float32)

    def forward_backward(self, role: str, rows: StageRows, loss: RowsLoss) -> Sequence[Any]:
        self.weights = hashlib.sha256(f"{self.weights} {[ids.tolist() for ids in rows.ids]}".encode()).hexdigest()
        return [{"loss": (1.0, self.number + 1.0)}]

    def optim_step(self, role: str, lr: float) -> Mapping[str, float]:
        self.number += 1
        self.weights = hashlib.sha256(f"{self.weights} {self.number} {lr}".encode()).hexdigest()
        return {"lr": lr, "grad_norm": 1.0}

    def measure(self, role: str, rows: StageRows, loss: RowsLoss) -> Sequence[Any]:
        tokens, count = float(sum(map(len, rows.ids))), float(len(rows))
        return [{"loss": (tokens if self.losses is None else self.losses[self.number] * count, count), "none": (0.0, 0.0)}]

    def means(self, metrics: Sequence[Any]) -> Mapping[str, float]:
        return finish(combine(metrics))

    def save(self, number: int, facts: Mapping[str, Any], hf_path: Path | None) -> None:
        assert not self.saves, "one save at a time"
        self.saves.append((number, self.weights, facts, hf_path))
        self.polls = 0

    def finish_save(self, wait: bool) -> Saved | None:
        self.polls += 1
        if not self.saves or not (wait or self.polls > 1):
            return None
        number, weights, facts, hf_path = self.saves.pop()
        self.root.mkdir(parents=True, exist_ok=True)
        if hf_path is not None:
            self.write(hf_path, weights, {STEP: f"{number}\n"})
        path = self.root / f"step-{number:06d}.json"
        path.write_text(json.dumps({"weights": weights, "facts": dict(facts)}))
        return Saved(number, path, hf_path, number, 0.0)

    def export(self, path: Path) -> Sequence[Gate]:
        self.write(path, self.weights, {})
        return [Gate("difference", 0.0, 1e-3, "")]

    def write(self, path: Path, weights: str, further: Mapping[str, str]) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        for name, content in {"weights": weights, **further}.items():
            (path / name).write_text(content)

    def close(self) -> None:
        assert not self.saves, "the stage has ended before its last save"


def one_rank() -> Ranks:
    return Ranks()


def run_rank(run_dirs: str, dies_in: str = "") -> None:
    """Runs one rank of the stages in `run_dirs` (JSON list), one after the other. Rank 0 is killed while it writes checkpoint number
    `dies_in`."""
    from polyreme_trainer.learner.__main__ import run_stage
    from polyreme_trainer.megatron.checkpoints import checkpoint
    from polyreme_trainer.megatron.device import Device
    from polyreme_trainer.megatron.models.build import init_parallel
    from polyreme_trainer.megatron.parallel.channel import BroadcastChannel

    if dies_in and os.environ["RANK"] == "0":
        write, count = checkpoint.write, 0

        def mortal(temporary: Path, own: checkpoint.RankContents) -> None:
            nonlocal count
            count += 1
            if count == int(dies_in):
                (temporary / next(iter(own.contents))).write_bytes(b"the first bytes")
                os.kill(os.getpid(), signal.SIGKILL)
            write(temporary, own)

        checkpoint.write = mortal
    folders = [Path(each) for each in json.loads(run_dirs)]
    first = read_stage_config(folders[0])
    device = Device("cpu")
    init_parallel(first.trainer.parallel, device)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = Ranks(rank, BroadcastChannel(device.torch) if world > 1 else None)
    for folder in folders:
        run_stage(folder, ranks, device, lambda: False)
