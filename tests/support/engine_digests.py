"""Run as a program: an engine loads versions from an arena and prints its workers' weight digests after each, as JSON.

python -m support.engine_digests MODEL_FILES TENSOR_PARALLEL STAGING...     (each a serialised StageArenaRequest)
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from polyreme.api.v1 import weights_pb2
from polyreme.weights.arena import Arena
from polyreme.weights.manifest import Manifest
from polyreme_rollout.engine.load import load_engine
from polyreme_rollout.engine.protocol import ArenaSource, InferenceEngine
from support.replicas import rollout_config


async def load_all(engine: InferenceEngine, stagings: list[Path]) -> list[Any]:
    """The workers' digests after each version."""
    await engine.open()
    answers = []
    for path in stagings:
        staging = weights_pb2.StageArenaRequest.FromString(path.read_bytes())
        nonce = Arena.open(staging.arena_path).nonce
        manifest = Manifest.from_proto(staging.manifest)
        await engine.pause()
        await engine.load([ArenaSource(staging.arena_path, nonce, staging.slot, staging.generation, manifest)])
        await engine.resume()
        answers.append(await engine.weight_digests())
    return answers


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
