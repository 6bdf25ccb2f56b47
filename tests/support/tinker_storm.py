"""Three clients with the public SDK that train and sample at the same time: `python -m support.tinker_storm URL BASE END...`.

BASE is the base model. END is the number of steps of a client, or a file, for all of them: each ends after the step in which it appears. The
last line is JSON.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.update(TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1")

import tinker
from tinker import types

from support.tinker_client import ADAM, scored

CLIENTS = 3
PROMPT = [5, 9, 14, 7]


def client(url: str, base: str, number: int, end: str) -> dict[str, Any]:
    """Each step samples from the newest weights and trains on the answers, so every answer decides all that follow."""
    service = tinker.ServiceClient(base_url=url, api_key=f"tml-{number}")
    model = service.create_lora_training_client(base_model=base, rank=2 + number, seed=number).result()
    answers, losses = list[list[list[int]]](), list[float]()
    while len(losses) < int(end) if end.isdecimal() else not Path(end).exists():
        step = len(losses)
        sampler = model.save_weights_and_get_sampling_client().result()
        options = types.SamplingParams(max_tokens=6, seed=step, stop=[])
        found = sampler.sample(types.ModelInput.from_ints(PROMPT), num_samples=2, sampling_params=options).result().sequences
        data = [scored(PROMPT, answer, 1.0 - 1.5 * place) for place, answer in enumerate(found)]
        parts = [model.forward_backward([each], "importance_sampling") for each in data]
        moved = model.optim_step(ADAM)
        losses.append(sum(part.result().metrics["loss:sum"] for part in parts))
        assert (moved.result().metrics or {})["step"] == step + 1
        if step % 5 == 4:
            model.save_state("newest", overwrite=True).result()
        answers.append([list(answer.tokens) for answer in found])
        print(number, step, flush=True)
    return {"answers": answers, "losses": losses}


if __name__ == "__main__":
    url, base, *ends = sys.argv[1:]
    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(client, url, base, number, ends[number % len(ends)]) for number in range(CLIENTS)]
        outcome = [each.result() for each in running]
    print(json.dumps(outcome), flush=True)
    os._exit(0)  # the SDK's threads would wait for a heartbeat
