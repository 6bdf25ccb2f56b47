"""Runs the parts of an iteration in one process, without services: engines, reward function, learner step, weight write and reload.

bench/peer.py runs it. It prints one JSON object: `seconds`, the median of each part, and `length`, the mean number of sampled tokens. The
parts are Polyreme's own, called one after the other; `rollout.replicas` engines share the prompts. The time of an iteration beyond the
parts' sum is the cost of the services.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.weights.manifest import ArenaSource
from polyreme_rollout.engine import vllm as engine_module
from polyreme_rollout.engine.protocol import EngineRequest, Sampling

RUN_ID = "bench-parts"


async def sample(
    engine: Any, config: Any, prompts: Sequence[Any], stop_ids: tuple[int, ...], turn: int, requests: int = 1
) -> list[list[tuple[list[int], list[float], str]]]:
    """Returns (ids, logprobs, finish) of every sample of every prompt. Each is sampled by so many requests, one after the other."""
    tokens = -(-config.rollout.max_new_tokens // requests)
    sampling = Sampling(config.rollout.temperature, 1.0, -1, stop_ids)

    async def one(number: int, prompt: Any) -> tuple[list[int], list[float], str]:
        ids: list[int] = []
        logprobs: list[float] = []
        for part in range(requests):
            name, asked = f"parts.{turn}.{number}.{part}", prompt.ids.tolist() + ids
            async for delta in engine.generate(EngineRequest(name, asked, tokens, turn * 100_000 + number, str(turn), sampling)):
                ids += delta.token_ids
                logprobs += delta.logprobs
                finish = delta.finish
        return ids, logprobs, finish

    size = config.group_size
    samples = await asyncio.gather(*(one(number, prompts[number // size]) for number in range(size * len(prompts))))
    return [list(samples[start : start + size]) for start in range(0, len(samples), size)]


async def sample_on_all(
    engines: Sequence[Any], config: Any, prompts: Sequence[Any], stop_ids: tuple[int, ...], turn: int, requests: int
) -> list[list[tuple[list[int], list[float], str]]]:
    """Like `sample`, with an equal share of the prompts on each engine."""
    size = -(-len(prompts) // len(engines))
    shares = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    sampled = await asyncio.gather(
        *(sample(engine, config, share, stop_ids, turn, requests) for engine, share in zip(engines, shares, strict=True))
    )
    return [group for share in sampled for group in share]


def measure(
    engines: Sequence[Any], config: RunConfig, iterations: int, after: str, *, ends: bool, requests: int
) -> dict[str, Any]:
    """`ends`: whether answers end with a stop token. `requests`: see `sample`."""
    import numpy as np

    from polyreme.api.v1 import experience_pb2
    from polyreme.experience.record_codec import encode_group
    from polyreme.experience.records import GroupRecord, SampleRecord
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
    size = config.groups_per_iteration
    for turn in range(1, iterations + 1):
        asked = prompts[(turn - 1) * size : turn * size]
        began = time.perf_counter()
        sampled = run(sample_on_all(engines, config, asked, template.stop_ids if ends else (), turn, requests))
        parts["generate"].append(time.perf_counter() - began)
        lengths += [len(ids) for samples in sampled for ids, _, _ in samples] if turn > 1 else []

        began = time.perf_counter()
        groups = []
        for index, (prompt, samples) in enumerate(zip(asked, sampled, strict=True)):
            texts = template.decode([ids for ids, _, _ in samples], special=False)
            records = []
            for text, (ids, logprobs, finish) in zip(texts, samples, strict=True):
                score = float((text.partition(after)[2] if after else text).strip() == prompt.label)
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
            groups.append(GroupRecord(index, 1, prompt.ids, records, prompt.text, prompt.label, 0.0, 0.0))
        parts["score"].append(time.perf_counter() - began)

        began = time.perf_counter()
        payloads = tuple(encode_group(group) for group in groups)
        learner.train(PlannedBatch(turn, tuple(range(len(groups))), payloads))
        parts["train"].append(time.perf_counter() - began)
        push(turn)
    learner.close()
    return {
        "seconds": {name: statistics.median(values[2:]) for name, values in parts.items()},
        "length": statistics.mean(lengths),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--after", default="")
    parser.add_argument("--tokens", type=int, help="Each answer has so many. Default: it ends with a stop token.")
    parser.add_argument("--requests", type=int, default=1, help="by which an answer is sampled, one after the other, as turns")
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    if options.tokens:
        rollout = config.rollout.model_copy(update={"max_new_tokens": options.tokens})
        config = config.model_copy(update={"rollout": rollout})
    engines: list[Any] = []
    try:
        for _ in range(config.rollout.replicas):
            engines.append(engine_module.start(config, config.model.path))
        ends, requests = not options.tokens, options.requests
        print(json.dumps(measure(engines, config, options.iterations, options.after, ends=ends, requests=requests)))
    finally:
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
