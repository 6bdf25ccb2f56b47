"""An inference engine in this process: `python sampler.py SERVE_YAML`. It executes the orders on its standard input, as `client.py` does."""

import asyncio
import json
import sys
import time
from contextlib import closing
from pathlib import Path

from serve_side.client import tokens

from polyreme.config.serve import ServeConfig, read_serve
from polyreme.process.event_loop import run_service
from polyreme_rollout.engine.load import load_engine
from polyreme_rollout.engine.protocol import EngineRequest, InferenceEngine, Sampling, ServedAdapter, ServesAdapters
from polyreme_rollout.engine.vllm_arguments import with_planned_loras
from polyreme_rollout.local.weights import SavedWeights


async def answer(
    engine: InferenceEngine, name: str, prompt: list[int], length: int, adapter: ServedAdapter | None = None
) -> None:
    request = EngineRequest(name, prompt, length, hash(name) % 2**62, "bench", Sampling(1.0, 1.0, -1, ()), adapter)
    found = [token async for new in engine.generate(request) for token in new.token_ids]
    assert len(found) == length


async def sample(
    engine: InferenceEngine, prompts: int, length: int, samples: int, answer_tokens: int, adapter: str | None = None
) -> float:
    """Seconds until every prompt has its answers, with the adapter in a directory."""
    served = None if adapter is None else ServedAdapter.newest(Path(adapter))
    if served is not None:
        assert isinstance(engine, ServesAdapters)
        await engine.load_adapter(served)
    began = time.perf_counter()
    seed = int(began * 1e6) % 10**9
    await asyncio.gather(
        *(
            answer(engine, f"{seed + number}x{sample}", tokens(seed + number, length), answer_tokens, served)
            for number in range(prompts)
            for sample in range(samples)
        )
    )
    return time.perf_counter() - began


async def push(engine: InferenceEngine, weights: SavedWeights, length: int) -> float:
    """Seconds from the base model's files to the first token that is sampled, once all weights have been written and loaded."""
    began = time.perf_counter()
    await engine.load([await asyncio.to_thread(weights.write, None)])
    await engine.resume()
    await answer(engine, f"push{began}", tokens(0, length), 1)
    return time.perf_counter() - began


async def serve(config: ServeConfig, engine: InferenceEngine) -> None:
    await engine.open()
    with closing(SavedWeights(config.model.path, engine.weight_names, config.model.dtype)) as weights:
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            case = order.pop("case")
            done = sample(engine, **order) if case == "sample" else push(engine, weights, **order)
            print(json.dumps(await done), flush=True)


def main() -> None:
    config = read_serve(Path(sys.argv[1]))
    run = with_planned_loras(config.as_run())
    with closing(load_engine(run.rollout.engine)(run, run.model.path, random_weights=False)) as engine:
        run_service(serve(config, engine))


if __name__ == "__main__":
    main()
