"""A client of the Tinker API with the public SDK: `python client.py URL BASE_MODEL`. It executes the orders on its standard input.

An order is a line of JSON, {"case": ..., options}; the answer is a line of JSON. It needs the package `tinker` alone, of any release, so that it
also runs against other servers.
"""

import json
import os
import random
import sys
import time
from typing import Any

os.environ.update(TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1")

import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
RANK = 8


def tokens(seed: int, count: int) -> list[int]:
    """Token ids of a model with at least 256 of them."""
    draw = random.Random(seed)
    return [draw.randrange(3, 256) for _ in range(count)]


def data(batch: int, length: int) -> list[Any]:
    """Sequences of `length` inputs each. Every target counts."""
    rows = [tokens(number, length + 1) for number in range(batch)]
    inputs: list[Any] = [{"target_tokens": row[1:], "weights": [1.0] * length} for row in rows]
    return [
        types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=given)
        for row, given in zip(rows, inputs, strict=True)
    ]


class Client:
    """A client and its models, which stay for all orders."""

    def __init__(self, url: str, base_model: str) -> None:
        self._service: Any = tinker.ServiceClient(base_url=url, api_key="tml-any")
        self._base_model = base_model
        self._models: list[Any] = []

    def steps(self, batch: int, length: int, steps: int, tenants: int = 1) -> float:
        """Seconds in which every one of `tenants` models takes `steps` optimizer steps, one after the other."""
        while len(self._models) < tenants:
            self._models.append(self._service.create_lora_training_client(self._base_model, rank=RANK))
        given, models = data(batch, length), self._models[:tenants]
        began = time.perf_counter()
        for _ in range(steps):
            started = [(model.forward_backward(given, "cross_entropy"), model.optim_step(ADAM)) for model in models]
            for step in started:
                for future in step:
                    future.result()
        return time.perf_counter() - began

    def sample(self, prompts: int, length: int, samples: int, answer: int) -> float:
        """Seconds until every prompt has its answers, with the weights of the first model."""
        sampler = self._models[0].save_weights_and_get_sampling_client().result()
        options = types.SamplingParams(max_tokens=answer, temperature=1.0, stop=[])

        def ask(first: int) -> list[Any]:
            given = [types.ModelInput.from_ints(tokens(number, length)) for number in range(first, first + prompts)]
            return [sampler.sample(each, num_samples=samples, sampling_params=options) for each in given]

        [future.result() for future in ask(10_000)]  # the weights are loaded, and nothing else runs
        began = time.perf_counter()
        found = [future.result() for future in ask(int(began * 1e6) % 10**9)]
        seconds = time.perf_counter() - began
        assert all(len(sequence.tokens) == answer for each in found for sequence in each.sequences)
        return seconds

    def snapshot(self, length: int) -> float:
        """Seconds from a model's last optimizer step to the first token that is sampled with its weights."""
        self.steps(1, length, 1)
        began = time.perf_counter()
        sampler = self._models[0].save_weights_and_get_sampling_client().result()
        prompt, options = types.ModelInput.from_ints(tokens(0, length)), types.SamplingParams(max_tokens=1)
        sampler.sample(prompt, num_samples=1, sampling_params=options).result()
        return time.perf_counter() - began


def main() -> None:
    client = Client(sys.argv[1], sys.argv[2])
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(client, order.pop("case"))(**order)), flush=True)
    os._exit(0)  # the SDK's threads would wait for a heartbeat


if __name__ == "__main__":
    main()
