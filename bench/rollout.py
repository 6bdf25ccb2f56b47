"""The cost of the rollout service: tokens per second through gRPC `Generate`, compared with a bare AsyncLLM in the same run.

    python bench/rollout.py [--rounds 5] [--groups 32] [--samples 8] [--tokens 100]
        [--prefix-caching PROMPT_TOKENS | --chunked-prefill PROMPT_TOKENS]

Both sides have an engine with the same settings and the demo's architecture. They get the same prompts, settings and seeds at the same
concurrency, and return tokens and log-probabilities as arrays, in chunks of at least 16. They take turns within one run; an idle engine
does not spin. `throughput_vs_engine` (>= 0.97) is the ratio of the medians.

With --prefix-caching PROMPT_TOKENS, the bench compares two bare engines instead, with and without `rollout.vllm.prefix_caching`, on prompts of
that length: `prefix_caching_speedup` (>= 1) is the ratio of the median times for all samples of all groups. With --chunked-prefill it does so
with and without `rollout.vllm.chunked_prefill`, in chunks of at most 512 tokens; `chunked_prefill_speedup` has no target.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # torch reads it when it is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np

from polyreme.config.run import RunConfig
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme_rollout.engine.vllm import start
from support.replicas import Learner, Replica, generate, hf_weights, model_files, replica, request, rollout_config

TARGET = {"throughput_vs_engine": 0.97}
RUN_ID = "bench-rollout"


def demo_model(path: Path, context: int = 256, vocabulary: int = 45) -> Path:
    """Saves a model of the demo's architecture with random weights. Returns its directory."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def with_tokenizer(model: Path, path: Path) -> Path:
    """Writes the files that a replica has of the model, without weights."""
    path.mkdir()
    for name, data in model_files(model).items():
        (path / name).write_bytes(data)
    return path


def prompts(groups: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, 45, size=rng.integers(5, 34)).tolist() for _ in range(groups)]


async def bare(engine: Any, asked: list[list[int]], samples: int, tokens: int, turn: int) -> int:
    """Runs one turn of the bare engine. Returns the number of tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def one(number: int, prompt: list[int]) -> int:
        params = SamplingParams(
            temperature=1.0, seed=number, max_tokens=tokens, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA, stream_interval=16,
        )  # fmt: skip
        given = {"type": "token", "prompt_token_ids": prompt, "cache_salt": str(turn)}
        total = 0
        async for output in engine.generate(given, params, f"{turn}.{number}"):
            completion = output.outputs[0]
            ids = np.asarray(completion.token_ids, np.int32)
            assert len(ids) == len(np.asarray(completion.logprobs.logprobs, np.float32))
            total += len(ids)
        return total

    jobs = [one(index * samples + sample, prompt) for index, prompt in enumerate(asked) for sample in range(samples)]
    return sum(await asyncio.gather(*jobs))


async def served(there: Replica, asked: list[list[int]], samples: int, tokens: int) -> int:
    """Runs one turn of the service. Returns the number of tokens."""

    async def one(group: int, prompt: list[int]) -> int:
        slots: list[tuple[int, list[int], int, int]] = [(i, [], tokens, group * samples + i) for i in range(samples)]
        answers = await generate(there.rollout, request(RUN_ID, prompt, slots, temperature=1.0))
        return sum(len(answer.ids) for answer in answers.values())

    return sum(await asyncio.gather(*(one(group, prompt) for group, prompt in enumerate(asked))))


async def measure(engine: Any, url: str, model: Path, folder: Path, config: RunConfig, options: argparse.Namespace) -> int:
    asked = prompts(options.groups)
    async with replica(url, RUN_ID, model, folder / "replica.log", config) as there:
        learner = Learner.of(RUN_ID, model)
        rates: dict[str, list[float]] = {"engine": [], "service": []}
        try:
            for turn in range(options.rounds + 1):
                weights = {name: tensor for name, tensor in hf_weights(model).items()}
                await learner.push(there.weights, turn, weights)  # no prefix is cached from the last turn
                sides: list[tuple[str, Callable[[], Awaitable[int]]]] = [
                    ("engine", partial(bare, engine, asked, options.samples, options.tokens, turn)),
                    ("service", lambda: served(there, asked, options.samples, options.tokens)),
                ]
                for name, side in sides if turn % 2 else reversed(sides):
                    started = time.perf_counter()
                    made = await side()
                    rate = made / (time.perf_counter() - started)
                    assert made == options.groups * options.samples * options.tokens
                    print(f"{'warm-up' if turn == 0 else f'round {turn}':8} {name:8} {rate:8.0f} tokens/s", flush=True)
                    if turn:
                        rates[name].append(rate)
        finally:
            learner.arena.close()
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["service"] / medians["engine"]
    measured = {
        "throughput_vs_engine": round(ratio, 3),
        "engine_tokens_per_second": round(medians["engine"]),
        "service_tokens_per_second": round(medians["service"]),
    }
    met = ratio >= TARGET["throughput_vs_engine"]
    print(json.dumps({"bench": "rollout", "measured": measured, "target": TARGET, "met": met}))
    return 0 if met else 1


@dataclass(frozen=True)
class Option:
    """An option of rollout.vllm that the bench compares. `least`: target of its speedup."""

    name: str
    on: dict[str, Any]
    off: dict[str, Any]
    least: float | None = None


OPTIONS = (
    Option("prefix_caching", {"prefix_caching": True}, {"prefix_caching": False}, least=1.0),
    Option("chunked_prefill", {"chunked_prefill": True, "max_num_batched_tokens": 512}, {"chunked_prefill": False}),
)


async def compare(option: Option, prompt_tokens: int, engines: dict[str, Any], options: argparse.Namespace) -> int:
    rng = np.random.default_rng(0)
    asked = [rng.integers(4, 45, size=prompt_tokens).tolist() for _ in range(options.groups)]
    for engine in engines.values():
        await engine.open()
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(options.rounds + 1):
        for name in engines if turn % 2 else reversed(engines):
            started = time.perf_counter()
            await bare(engines[name].llm, asked, options.samples, options.tokens, turn)
            seconds[name].append(time.perf_counter() - started)
            print(f"{'warm-up' if turn == 0 else f'round {turn}':8} {name:8} {seconds[name][-1]:8.2f} s", flush=True)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    speedup = round(medians["without"] / medians["with"], 3)
    measured = {
        f"{option.name}_speedup": speedup,
        "prompt_tokens": prompt_tokens,
        "tokens": options.tokens,
        "samples": options.samples,
    }
    target = {} if option.least is None else {f"{option.name}_speedup": option.least}
    met = option.least is None or speedup >= option.least
    print(json.dumps({"bench": "rollout", "measured": measured, "target": target, "met": met}))
    return 0 if met else 1


def bench_option(option: Option, prompt_tokens: int, folder: Path, options: argparse.Namespace) -> int:
    """Compares two engines, which start one after the other since each start forks."""
    context = prompt_tokens + options.tokens
    model = demo_model(folder / "model", context)
    engines: dict[str, Any] = {}
    try:
        for name, chosen in (("with", option.on), ("without", option.off)):
            vllm = {"kv_cache_mib": 512, **chosen}
            config = rollout_config(model, max_model_len=context, max_num_seqs=256, vllm=vllm)
            engines[name] = start(config, with_tokenizer(model, folder / name))
        return asyncio.run(compare(option, prompt_tokens, engines, options))
    finally:
        for engine in engines.values():
            engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=100)
    compared = parser.add_mutually_exclusive_group()
    for option in OPTIONS:
        flag, text = f"--{option.name.replace('_', '-')}", f"compare {option.name} on prompts of this length"
        compared.add_argument(flag, type=int, metavar="PROMPT_TOKENS", help=text)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for option in OPTIONS:
            if prompt_tokens := getattr(options, option.name):
                return bench_option(option, prompt_tokens, Path(folder), options)
        model = demo_model(Path(folder) / "model")
        config = rollout_config(model, max_model_len=160, max_num_seqs=256, vllm={"kv_cache_mib": 256})
        engine = start(config, with_tokenizer(model, Path(folder) / "files"))
        try:
            with EmbeddedServer.start(Path(folder) / "redis") as server:
                return asyncio.run(measure(engine.llm, server.url, model, Path(folder), config, options))
        finally:
            engine.close()


if __name__ == "__main__":
    raise SystemExit(main())
