"""Synthetic runs, recorded from seeds by the real recorder: a policy that learns to add.

The code of a real run writes everything on disk; only the numbers and texts are synthetic.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.experience.record_codec import TrainedSamples, encode_group
from polyreme.experience.records import EpisodeRecord, GroupRecord, RewardCall, RewardPart, SampleRecord, ToolCall, Turn
from polyreme.experience.run import RunState
from polyreme_trainer.observe.metrics import episodes as episode_metrics
from polyreme_trainer.observe.records import Recorder
from support.configs import run_config

GROUPS, SAMPLES = 4, 4
"""Groups per iteration, and samples per group."""
SECONDS = 8.0
"""Wall time of an iteration in seconds."""
REPLICAS = ("rollout-a", "rollout-b")
VOCABULARY = ["<pad>", "<eos>", *"0123456789", " ", "+", "=", "so", "the", "sum", "is", "\n"]
_RECORDS_AT_ONCE = 100
Made = Iterator[tuple[dict[str, Any], list[GroupRecord], TrainedSamples | None]]


def skill(iteration: int, iterations: int, seed: int = 0) -> float:
    """The policy's accuracy at an iteration. Seeds learn at different speeds."""
    return float(0.15 + (0.8 - 0.05 * (seed % 3)) / (1 + np.exp(-8 * (iteration / iterations - 0.35 - 0.1 * (seed % 3)))))


def answer(random: np.random.Generator, total: int, right: bool, wordy: float) -> list[int]:
    """Token ids of an answer."""
    shown = total if right else total + int(random.integers(1, 9))
    thought = (
        [VOCABULARY.index(word) for word in ("so", " ", "the", " ", "sum", " ", "is", " ")] if random.random() < wordy else []
    )
    return [*thought, *(VOCABULARY.index(digit) for digit in str(shown)), 1]


def made_group(random: np.random.Generator, index: int, iteration: int, right_share: float, began: float) -> GroupRecord:
    """A group of answers to one sum; prompts repeat after 40 groups."""
    a, b = 11 + index % 40, 7 + (3 * index) % 40
    replica, samples = REPLICAS[index % 2], []
    for place in range(SAMPLES):
        right = bool(random.random() < right_share)
        ids = np.array(answer(random, a + b, right, 1.0 - 0.7 * right_share), dtype=np.int32)
        mixed = iteration > 2 and len(ids) > 4 and random.random() < 0.2
        spans = [(iteration - 2, 0, 3), (iteration - 1, 3, len(ids))] if mixed else [(iteration - 1, 0, len(ids))]
        calls = [RewardCall("reward-1", "ok", "", 0.05 + 0.1 * random.random())]
        if random.random() < 0.1:
            calls.insert(0, RewardCall("reward-1", "timeout", "expected an answer within 10 s", 10.0))
        cut = place == 0 and random.random() < 0.05
        samples.append(
            SampleRecord(
                token_ids=ids,
                logprobs=-random.exponential(0.5 * (1.2 - right_share), len(ids)).astype(np.float32),
                loss_mask=np.ones(len(ids), dtype=np.uint8),
                finish_reason=pb.FINISH_REASON_LENGTH if cut else pb.FINISH_REASON_STOP,
                spans=spans,
                score=float(right) - 0.1 * (len(ids) > 6),
                parts=[
                    RewardPart("exact", float(right), float(right)),
                    RewardPart("length", float(len(ids) > 6), -0.1 * (len(ids) > 6)),
                ],
                text="".join(VOCABULARY[number] for number in ids[:-1]),
                replicas=(*((REPLICAS[1 - index % 2],) if mixed else ()), replica),
                calls=tuple(calls),
            )
        )
    seconds = 1.5 + float(random.random())
    return GroupRecord(
        index, 1, np.arange(2, 12, dtype=np.int32), samples, f"What is {a} + {b}?", str(a + b), seconds, 0.2 + 0.3 * float(random.random()), began
    )  # fmt: skip


def made_episodes(group: GroupRecord) -> GroupRecord:
    """The group as episodes of two turns: the policy calls a tool, reads its result, and answers."""
    samples, episodes = [], []
    for number, sample in enumerate(group.samples):
        asked, read = np.array([4, 15, 5], np.int32), np.array([14, 9, 14], np.int32)
        error = "expected two numbers" if number == 2 else ""
        call = ToolCall("add", '{"a": 2, "b": 3}', "" if error else "5", 0.4, error)
        first = Turn(0, len(asked), 0.0, 0.8, (call,))
        last = Turn(len(asked) + len(read), len(asked) + len(read) + len(sample), sample.score, 0.6)
        zeros = np.zeros(len(read), np.float32)
        whole = replace(
            sample,
            token_ids=np.concatenate([asked, read, sample.token_ids]),
            logprobs=np.concatenate([np.full(len(asked), -0.2, np.float32), zeros, sample.logprobs]),
            loss_mask=np.concatenate([np.ones(len(asked), np.uint8), zeros.astype(np.uint8), sample.loss_mask]),
            spans=[(sample.spans[0][0], 0, len(asked)), *((version, start + 6, end + 6) for version, start, end in sample.spans)],
            turns=(first, last),
            episode=number,
        )
        samples.append(whole)
        messages = [
            {"role": "system", "content": "Use the tool."},
            {"role": "user", "content": [{"type": "text", "text": group.prompt}]},
            {"role": "assistant", "content": f"<tool_call>{call.name}</tool_call>", "trajectory": 0, "turn": 0},
            {"role": "tool", "content": call.error or call.result},
            {"role": "assistant", "content": sample.text, "trajectory": 0, "turn": 1},
        ]
        outcome = pb.OUTCOME_TURNS if number == 2 else pb.OUTCOME_STOP
        episodes.append(EpisodeRecord(outcome, json.dumps(messages), 0.5))
    return replace(group, samples=samples, episodes=episodes)


def used(groups: list[GroupRecord]) -> TrainedSamples:
    """Group-relative advantages and equal weights."""
    samples = [(group, sample) for group in groups for sample in group.samples]
    advantages = [np.full(sample.sampled_tokens, sample.score - group.mean_reward, dtype=np.float32) for group, sample in samples]
    return TrainedSamples(
        np.concatenate(advantages), np.full(len(samples), 1 / len(samples), np.float32), np.ones((len(samples), 1), np.int32)
    )


def made_run(iterations: int, seed: int, started: float, group_count: int = GROUPS) -> Made:
    """The records of a run in order, each with the groups of its iteration."""
    random = np.random.default_rng(seed)
    yield {"kind": "start", "start": 1, "forked_from": None, "time": started}, [], None
    yield (
        {
            "kind": "replicas",
            "replicas": {name: f"http://127.0.0.1:800{at}/v1" for at, name in enumerate(REPLICAS)},
            "time": started,
        },
        [],
        None,
    )
    index = 0
    for iteration in range(1, iterations + 1):
        end, share = started + SECONDS * iteration, skill(iteration, iterations, seed)
        groups = []
        for place in range(group_count):
            groups.append(made_group(random, index, iteration, share, end - SECONDS + 0.4 + 0.5 * place))
            index += 1
        scores = np.array([sample.score for group in groups for sample in group.samples] or [0.0])
        wait, train = 4.0 + float(random.random()), 2.0 + float(random.random())
        record = {
            "kind": "iteration", "iteration": iteration, "time": end, "reward/mean": float(scores.mean()), "reward/std": float(scores.std()),
            "response_length/mean": 9 - 4 * iteration / iterations + float(random.normal(0, 0.3)), "entropy": 0.6 * (1.2 - share),
            "mismatch_kl": 1e-4 * float(random.lognormal(0, 0.3)), "grad_norm": float(random.lognormal(-1, 0.3)), "actor/lr": 1e-5,
            "actor/pg_loss": float(random.normal(0, 0.02)), "staleness/mean": 0.2 * float(random.random()), "stop/length_fraction": 0.02 * float(random.random()),
            "tokens_per_second": 2400 + 200 * float(random.normal()), "samples_per_second": len(groups) * SAMPLES / SECONDS, "actor/ppo_kl": 0.0, "rollout/dropped_groups": 0.0, "time/iteration": SECONDS, "time/learner_wait": wait, "time/train": train, "time/write": 0.4, "resources/trainer/memory_bytes": 2.5 * 2**30, "resources/rollout/cores": 1.5 + share,
            "alarms": ["responses get shorter"] if iteration == iterations else [],
        }  # fmt: skip
        yield record, groups, used(groups) if groups else None
        for at, replica in enumerate(REPLICAS[: 1 + (group_count > 2)]):
            stall = 0.03 + 0.02 * float(random.random())
            commit = {
                "kind": "commit",
                "replica": replica,
                "version": iteration,
                "stall_seconds": stall,
                "reload_seconds": stall / 2,
                "path": "arena",
            }
            yield {**commit, "time": end + 0.2 + 0.1 * at}, [], None
        if iteration % max(1, iterations // 8) == 0:
            result = {
                "kind": "eval",
                "version": iteration,
                "accuracy": share,
                "samples": 20,
                "seconds": 1.2,
                "parts": {},
                "examples": [],
            }
            yield {**result, "time": end + 1.5}, [], None
    end = started + SECONDS * iterations + 2
    yield (
        {"kind": "saved", "iteration": iterations, "path": "checkpoints/last", "hf_path": "hf/last", "seconds": 0.8, "time": end},
        [],
        None,
    )
    yield {"kind": "alarm", "text": "responses get shorter", "time": end}, [], None
    yield {"kind": "notice", "service": "orchestrator", "text": "took over 2 groups in flight", "time": end}, [], None
    yield {"kind": "restart", "process": "rollout-1", "text": "exit status 137", "time": end}, [], None


def record_run(
    run_dir: Path, iterations: int, seed: int, groups: int = GROUPS, state: RunState = RunState.DONE, *, episodes: bool = False
) -> None:
    """Writes the directory of such a run. `episodes`: its groups are episodes of two turns with a tool."""
    run_dir.mkdir(parents=True)
    config = run_config(run_dir.parent, name=run_dir.name, output_dir=run_dir.parent, iterations=iterations)
    (run_dir / "config.yaml").write_text(config.to_yaml())
    (run_dir / "run.json").write_text(json.dumps({"run_id": f"{run_dir.name}-{seed}", "redis": "embedded"}))
    (run_dir / "vocabulary.json").write_text(json.dumps(VOCABULARY))
    by_iteration: dict[int, tuple[list[bytes], bytes | None]] = {}

    async def groups_of(iteration: int) -> tuple[list[bytes], bytes | None]:
        return by_iteration.pop(iteration)

    async def record() -> None:
        with closing(
            Recorder.open(config.run_dir, f"{run_dir.name}-{seed}", config.samples_per_iteration, groups_of)
        ) as recorder:
            started, lines = time.time() - SECONDS * iterations - 10, list[tuple[str, dict[str, Any]]]()
            for number, (line, made, trained) in enumerate(made_run(iterations, seed, started, groups)):
                if line["kind"] == "iteration":
                    if episodes:
                        made = [made_episodes(group) for group in made]
                        trained = used(made)
                        line |= episode_metrics(made)
                    by_iteration[line["iteration"]] = (
                        [encode_group(group) for group in made],
                        trained.encode() if trained else None,
                    )
                lines.append((f"{round(line['time'] * 1000)}-{number}", line))
                if len(lines) == _RECORDS_AT_ONCE:
                    await recorder.take(lines, (RunState.RUNNING, ""))
                    lines.clear()
            await recorder.take(lines, (RunState.RUNNING, ""))
            await recorder.take([], (state, ""))
        write_answers(run_dir, iterations, seed)

    asyncio.run(record())


def write_answers(run_dir: Path, version: int, seed: int) -> None:
    """Writes the answers of the last evaluation."""
    random = np.random.default_rng(seed)
    lines = []
    for row in range(20):
        total = int(random.integers(20, 90))
        fields = {
            "version": version,
            "row": row,
            "prompt": f"What is {total - 9} + 9?",
            "response": str(total),
            "label": str(total),
            "score": 1.0,
        }
        lines.append(json.dumps({**fields, "tokens": 3, "finish_reason": "stop"}) + "\n")
    (run_dir / "samples" / f"evaluation_{version:04d}.jsonl").write_text("".join(lines))


def telling_sample(run_dir: Path) -> dict[str, Any]:
    """The first sample that two versions sampled and whose first reward call failed."""
    files = sorted((run_dir / "samples").glob("iteration_*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return next(line for line in lines if len(line["calls"]) > 1 and len(line["spans"]) > 1)
