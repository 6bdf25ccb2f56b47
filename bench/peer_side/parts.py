"""Runs the parts of an iteration in one process, without services: engines, reward function, learner step, weight write and reload.

bench/peer.py runs it. It prints one JSON object: `seconds`, the median of each part, `steps`, the sum of an iteration's parts, and `length`,
the mean number of sampled tokens. The parts are Polyreme's own, called one after the other; `rollout.replicas` engines share the prompts.
The time of an iteration beyond the parts' sum is the cost of the services. With --replay, the iterations are those of a run: each answer
has as many tokens, and the same reward.
"""

import argparse
import asyncio
import itertools
import json
import operator
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.weights.manifest import ArenaSource
from polyreme_rollout.engine import vllm as engine_module
from polyreme_rollout.engine.protocol import EngineRequest, Sampling

RUN_ID = "bench-parts"


@dataclass(frozen=True)
class Group:
    """A prompt, and how many tokens each of its answers may have; the rewards and finish reasons, if they are those of a run."""

    prompt: Any
    tokens: Sequence[int]
    rewards: Sequence[float] = ()
    finishes: Sequence[str] = ()


Answer = tuple[list[int], list[float], str]
"""The token ids of an answer, their log-probabilities and its finish reason."""


async def sample(
    engine: Any, config: Any, groups: Sequence[Group], stop_ids: tuple[int, ...], turn: int, requests: int = 1
) -> list[list[Answer]]:
    """Returns every answer to every prompt. Each is sampled by so many requests, one after the other."""
    sampling = Sampling(config.rollout.temperature, 1.0, -1, stop_ids)

    async def one(number: int, prompt: Any, tokens: int) -> Answer:
        ids: list[int] = []
        logprobs: list[float] = []
        for part in range(requests):
            name, asked = f"parts.{turn}.{number}.{part}", prompt.ids.tolist() + ids
            most = -(-tokens // requests)
            async for delta in engine.generate(EngineRequest(name, asked, most, turn * 100_000 + number, str(turn), sampling)):
                ids += delta.token_ids
                logprobs += delta.logprobs
                finish = delta.finish
        return ids, logprobs, finish

    asked = [(group.prompt, tokens) for group in groups for tokens in group.tokens]
    samples = iter(await asyncio.gather(*(one(number, *each) for number, each in enumerate(asked))))
    return [list(itertools.islice(samples, len(group.tokens))) for group in groups]


async def sample_on_all(
    engines: Sequence[Any], config: Any, groups: Sequence[Group], stop_ids: tuple[int, ...], turn: int, requests: int
) -> list[list[Answer]]:
    """Like `sample`, with an equal share of the prompts on each engine."""
    size = -(-len(groups) // len(engines))
    shares = [groups[start : start + size] for start in range(0, len(groups), size)]
    sampled = await asyncio.gather(
        *(sample(engine, config, share, stop_ids, turn, requests) for engine, share in zip(engines, shares, strict=True))
    )
    return [group for share in sampled for group in share]


def recorded(folder: Path, prompts: Sequence[Any]) -> list[list[Group]]:
    """The groups of each iteration of a run, from its sample files."""
    by_text = {prompt.text: prompt for prompt in prompts}
    iterations = []
    for file in sorted(folder.glob("iteration_*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        groups = []
        for _, rows in itertools.groupby(lines, key=operator.itemgetter("group")):
            each = list(rows)
            tokens, rewards, finishes = ([row[name] for row in each] for name in ("tokens", "score", "finish_reason"))
            groups.append(Group(by_text[each[0]["prompt"]], tokens, rewards, finishes))
        iterations.append(groups)
    return iterations


def measure(engines: Sequence[Any], config: RunConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Returns what this script prints. `options`: its arguments."""
    import numpy as np

    from polyreme.api.v1 import experience_pb2
    from polyreme.experience.record_codec import encode_group
    from polyreme.experience.records import GroupRecord, SampleRecord
    from polyreme.process.lifecycle import freeze_gc
    from polyreme.process.tasks import together
    from polyreme.rundir.input_files import read_model_files
    from polyreme_trainer.data.prompts import load_prompts
    from polyreme_trainer.data.template import Template
    from polyreme_trainer.learner.engine import PlannedBatch
    from polyreme_trainer.learner.leader import Ranks
    from polyreme_trainer.megatron.device import Device
    from polyreme_trainer.megatron.models.build import init_parallel
    from polyreme_trainer.megatron.run_engine import RunEngine

    device = Device(config.device, 0, config.trainer.parallel.threads)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    init_parallel(config.trainer.parallel, device)
    files = read_model_files(config.model.path)
    learner = RunEngine(config, files, RUN_ID, Ranks(), device)
    learner.policy.load_hf(config.model.path)
    if learner.algorithm.needs.reference:
        learner.make_reference(config.model.path)
    template = Template(files, config.data)
    prompts = load_prompts(config.data.train, config.data, template).prompts
    if options.replay:
        work = recorded(options.replay, prompts)
    else:
        tokens, size = [options.tokens or config.rollout.max_new_tokens] * config.group_size, config.groups_per_iteration
        work = [[Group(each, tokens) for each in prompts[turn * size : (turn + 1) * size]] for turn in range(options.iterations)]
    run = asyncio.Runner().run  # `Ranks` has its own event loop
    for engine in engines:
        run(engine.open())
    lengths: list[int] = []
    parts: dict[str, list[float]] = {name: [] for name in ("generate", "score", "train", "write", "load")}

    async def load(engine: Any, source: ArenaSource) -> None:
        await engine.load([source])
        await engine.resume()

    def push(turn: int) -> None:
        began = time.perf_counter()
        written = learner.write(turn % 3, turn, 1)
        parts["write"].append(time.perf_counter() - began)
        assert written.manifest is not None
        began = time.perf_counter()
        source = ArenaSource(str(learner.arena.path), learner.arena.nonce, written.slot, written.generation, written.manifest)
        run(together([load(engine, source) for engine in engines]))
        parts["load"].append(time.perf_counter() - began)

    push(0)
    fixed = bool(options.replay or options.tokens)
    for turn, asked in enumerate([work[0], *work], 1):  # the first one warms up
        began = time.perf_counter()
        sampled = run(sample_on_all(engines, config, asked, () if fixed else template.stop_ids, turn, options.requests))
        parts["generate"].append(time.perf_counter() - began)
        lengths += [len(ids) for samples in sampled for ids, _, _ in samples] if turn > 1 else []

        began = time.perf_counter()
        groups = []
        for index, (group, samples) in enumerate(zip(asked, sampled, strict=True)):
            texts = template.decode([ids for ids, _, _ in samples], special=False)
            records = []
            for number, (text, (ids, logprobs, finish)) in enumerate(zip(texts, samples, strict=True)):
                answer = text.partition(options.after)[2] if options.after else text
                score = float(answer.strip() == group.prompt.label)
                if group.rewards:
                    score, finish = group.rewards[number], group.finishes[number]
                reason = experience_pb2.FINISH_REASON_STOP if finish == "stop" else experience_pb2.FINISH_REASON_LENGTH
                records.append(
                    SampleRecord(
                        np.array(ids, np.int32),
                        np.array(logprobs, np.float32),
                        np.ones(len(ids), np.uint8),
                        reason,
                        [(turn - 1, 0, len(ids))],
                        score,
                        text=text,
                    )
                )
            groups.append(GroupRecord(index, 1, group.prompt.ids, records, group.prompt.text, group.prompt.label, 0.0, 0.0))
        parts["score"].append(time.perf_counter() - began)

        began = time.perf_counter()
        payloads = tuple(encode_group(group) for group in groups)
        learner.train(PlannedBatch(turn, tuple(range(len(groups))), payloads))
        parts["train"].append(time.perf_counter() - began)
        push(turn)
        if turn == 1:
            freeze_gc()  # as the services do
    learner.close()
    counted = {name: values[-len(work) :] for name, values in parts.items()}
    return {
        "seconds": {name: statistics.median(values) for name, values in counted.items()},
        "length": statistics.mean(lengths),
        "steps": [sum(each) for each in zip(*counted.values(), strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--after", default="")
    parser.add_argument("--tokens", type=int, help="Each answer has so many. Default: it ends with a stop token.")
    parser.add_argument("--replay", type=Path, help="The sample files of a run.")
    parser.add_argument("--requests", type=int, default=1, help="by which an answer is sampled, one after the other, as turns")
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    engines: list[Any] = []
    try:
        for _ in range(config.rollout.replicas):
            engines.append(engine_module.start(config, config.model.path))
        print(json.dumps(measure(engines, config, options)))
    finally:
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
