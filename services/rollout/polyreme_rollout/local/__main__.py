"""The sampler process of a training service. POLYREME_REDIS and POLYREME_RUN_DIR name the service, as for its learner."""

import asyncio
import os
from contextlib import closing
from pathlib import Path

from polyreme.config.serve import ServeConfig, read_serve
from polyreme.experience.requests import RequestLog
from polyreme.experience.store import RECONNECT_TIMEOUT, connect
from polyreme.process import logging_setup
from polyreme.process.lifecycle import exit_on_error, freeze_gc, stop_event
from polyreme_rollout.engine.load import load_engine
from polyreme_rollout.engine.plain_openai import TokenizerCodec
from polyreme_rollout.engine.protocol import InferenceEngine
from polyreme_rollout.local.requests import ServedSampler
from polyreme_rollout.local.weights import SavedWeights


async def serve(config: ServeConfig, engine: InferenceEngine) -> None:
    """Answers requests until a signal."""
    stop = stop_event()
    path = config.model.path
    codec = await asyncio.to_thread(TokenizerCodec.of, path)
    redis = await connect(os.environ["POLYREME_REDIS"], RECONNECT_TIMEOUT)
    try:
        await engine.open()
        with closing(SavedWeights(path, engine.weight_names, config.model.dtype)) as weights:
            freeze_gc()
            log = RequestLog(redis, config.name)
            await ServedSampler(log, engine, weights, codec.stop_ids, codec.decode_whole).run(stop)
    finally:
        await redis.aclose()


def main() -> None:
    logging_setup.setup("sampler")
    with exit_on_error("sampler"):
        config = read_serve(Path(os.environ["POLYREME_RUN_DIR"]) / "config.yaml")
        run = config.as_run()
        with closing(load_engine(run.rollout.engine)(run, run.model.path, random_weights=False)) as engine:
            asyncio.run(serve(config, engine))


if __name__ == "__main__":
    main()
