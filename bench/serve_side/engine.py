"""The training service's engine in this process: `python engine.py SERVE_YAML`. It executes the orders on its standard input, as `client.py` does."""

import json
import sys
import time
from pathlib import Path

import numpy as np
from serve_side.client import RANK, tokens

from polyreme.config.serve import read_serve
from polyreme.config.trainer import LoraConfig
from polyreme_trainer.service.batch import Batch, LossCall
from polyreme_trainer.service.engine import ServiceEngine
from polyreme_trainer.service.messages import AdamSettings

ADAM = AdamSettings(learning_rate=1e-4, eps=1e-8)


def steps(engine: ServiceEngine, batch: int, length: int, steps: int) -> float:
    """Seconds in which the model takes `steps` optimizer steps, on the data of `client.Client.steps`."""
    rows = [np.array(tokens(number, length + 1)) for number in range(batch)]
    weights = {"weights": np.ones(batch * length, dtype=np.float32)}
    given = LossCall(Batch([row[:-1] for row in rows], [row[1:] for row in rows], weights), "cross_entropy", {})
    began = time.perf_counter()
    for _ in range(steps):
        engine.forward_backward({"model": given})
        engine.optim_step("model", ADAM)
    return time.perf_counter() - began


def main() -> None:
    with ServiceEngine.open(read_serve(Path(sys.argv[1])).as_run()) as engine:
        engine.create("model", LoraConfig(rank=RANK, alpha=32.0), 0)
        for line in sys.stdin:
            print(json.dumps(steps(engine, **json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
