"""A run directory written by the trainer's own recorder from synthetic records."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.config.run import RunConfig
from polyreme.experience.record_codec import encode_group
from polyreme.experience.records import GroupRecord, RewardPart, SampleRecord
from polyreme.experience.run import RunState
from polyreme.rundir.run_directory import RunFile, write_run_file
from polyreme.rundir.run_records import write_end
from polyreme_trainer.observe.records import Recorder
from support.configs import run_config

STEP_MILLISECONDS = 2000
"""Seconds between two records."""


def record_run(
    folder: Path, name: str = "letters", iterations: int = 3, end: RunState | None = RunState.DONE, **changes: Any
) -> Path:
    """Writes a run's directory and returns it.

    Iteration i has 4 groups of 2 samples: of group g, sample 0 has a reward of 1 and i tokens, sample 1 a reward of 0 and 2 * i tokens. Its
    mean reward is i / 10. The evaluation after iteration i has an accuracy of i / 10.

    Args:
        folder: parent of runs/.
        name: name of the run.
        iterations: number of trained iterations.
        end: its final state, or None for a running run.
        changes: changes of the configuration.
    """
    config = run_config(folder, name=name, iterations=iterations, **changes)
    config.run_dir.mkdir(parents=True)
    run_id = f"{name}-20260101-000000-abcd"
    (config.run_dir / "config.yaml").write_text(config.to_yaml())
    write_run_file(
        config.run_dir, RunFile(run_id, "embedded", "redis://127.0.0.1:1/0", replicas={"rollout-a": "http://127.0.0.1:2/v1"})
    )
    records = [
        {"kind": "start", "start": 1, "forked_from": None},
        {"kind": "commit", "replica": "rollout-a", "version": iterations},
    ]
    for number in range(iterations + 1):
        records += [_iteration(number)] * (number > 0) + [_evaluation(number)]
    stream = [(f"{STEP_MILLISECONDS * (place + 1)}-0", record) for place, record in enumerate(records)]
    asyncio.run(_write(config, run_id, stream))
    if end:
        write_end(config.run_dir, run_id, end, "" if end is RunState.DONE else "out of luck")
    return config.run_dir


async def _write(config: RunConfig, run_id: str, stream: list[tuple[str, dict[str, Any]]]) -> None:
    async def groups_of(iteration: int) -> tuple[list[bytes], bytes | None]:
        return [_group(iteration, place) for place in range(4)], None

    with closing(Recorder.open(config.run_dir, run_id, config.samples_per_iteration, groups_of)) as recorder:
        await recorder.take(stream, (RunState.RUNNING, ""))


def _iteration(number: int) -> dict[str, Any]:
    times = {"time/iteration": 2.0, "time/learner_wait": 1.0, "time/train": 0.5, "time/write": 0.1}
    rates = {"response_length/mean": 1.5 * number, "tokens_per_second": 100.0 * number}
    return {"kind": "iteration", "iteration": number, "reward/mean": number / 10, "alarms": [], **rates, **times}


def _evaluation(version: int) -> dict[str, Any]:
    return {"kind": "eval", "version": version, "accuracy": version / 10, "samples": 2, "seconds": 0.5, "examples": []}


def _group(iteration: int, place: int) -> bytes:
    index = 4 * (iteration - 1) + place

    def sample(score: float, tokens: int) -> SampleRecord:
        return SampleRecord(
            token_ids=np.arange(tokens, dtype=np.int32),
            logprobs=np.full(tokens, -0.5, dtype=np.float32),
            loss_mask=np.ones(tokens, dtype=np.uint8),
            finish_reason=pb.FINISH_REASON_STOP,
            spans=[(iteration - 1, 0, tokens)],
            score=score,
            parts=[RewardPart("exact", score, score)],
            text=f"answer {index}: {'right' if score else 'wrong'}",
        )

    samples = [sample(1.0, iteration), sample(0.0, 2 * iteration)]
    return encode_group(GroupRecord(index, 1, np.arange(4, dtype=np.int32), samples, f"question {index}?", "5"))
