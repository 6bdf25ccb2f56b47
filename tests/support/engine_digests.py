"""A program: an engine loads versions from an arena and prints, after each, its workers' weights and answers as JSON.

python -m support.engine_digests MODEL_FILES TENSOR_PARALLEL STAGING...     (each a serialised StageArenaRequest)
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from polyreme.api.v1 import weights_pb2
from polyreme.weights.arena import Arena
from polyreme.weights.manifest import ArenaSource, Manifest
from polyreme_rollout.engine.load import load_engine
from polyreme_rollout.engine.protocol import EngineRequest, InferenceEngine, Sampling
from support.replicas import rollout_config

PROMPT = [5, 6, 7, 8, 9]
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, stop_token_ids=())


async def load_all(engine: InferenceEngine, stagings: list[Path]) -> list[Any]:
    """Returns, for each version, the workers' digests, and 32 greedy tokens with their log-probabilities."""
    await engine.open()
    answers = []
    for path in stagings:
        staging = weights_pb2.StageArenaRequest.FromString(path.read_bytes())
        nonce = Arena.open(staging.arena_path).nonce
        manifest = Manifest.from_proto(staging.manifest)
        await engine.load([ArenaSource(staging.arena_path, nonce, staging.slot, staging.generation, manifest)])
        await engine.resume()
        answers.append({"workers": await engine.weight_digests(), **await greedy(engine, path.name)})
    return answers


async def greedy(engine: InferenceEngine, salt: str) -> dict[str, Any]:
    ids: list[int] = []
    logprobs: list[float] = []
    async for delta in engine.generate(EngineRequest(salt, PROMPT, 32, 0, salt, GREEDY)):
        ids += delta.token_ids
        logprobs += delta.logprobs
    return {"ids": ids, "logprobs": logprobs, "names": sorted(engine.weight_names)}


def main() -> None:
    files, parallel, *stagings = sys.argv[1:]
    engine = load_engine("vllm")(rollout_config(Path(files), tensor_parallel=int(parallel)), Path(files))
    try:
        answers = asyncio.run(load_all(engine, [Path(path) for path in stagings]))
    finally:
        engine.close()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
