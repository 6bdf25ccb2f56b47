"""The minimum time of a PPO iteration of bench/peer_ppo.py on this machine: the engine alone, and four models in plain torch.

Prints one JSON object with the median seconds of each part. The engine generates the iteration's answers without a service. Plain torch
then
runs the reference, the critic and the reward model over as many tokens and trains actor and critic, with both threads and without padding.
There is no service, no queue, no weight push and no metric.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_side.parts import Group, sample
from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.rundir.input_files import read_model_files
from polyreme_rollout.engine import vllm as engine_module
from polyreme_trainer.data.prompts import load_prompts
from polyreme_trainer.data.template import Template


def generate(config: RunConfig, iterations: int) -> tuple[float, int]:
    """Returns the seconds of generating an iteration's answers, and the mean number of tokens of a prompt and its answer."""
    template = Template(read_model_files(config.model.path), config.data)
    prompts = load_prompts(config.data.train, config.data, template).prompts
    engine: Any = engine_module.start(config, config.model.path)
    seconds, lengths = [], []
    try:
        run = asyncio.Runner().run
        run(engine.open())
        for turn in range(1, iterations + 1):
            asked = prompts[(turn - 1) * config.groups_per_iteration : turn * config.groups_per_iteration]
            began = time.perf_counter()
            tokens = [config.rollout.max_new_tokens] * config.group_size
            groups = [Group(prompt, tokens) for prompt in asked]
            sampled = run(sample(engine, config, groups, template.stop_ids, turn))
            seconds.append(time.perf_counter() - began)
            pairs = zip(asked, sampled, strict=True)
            lengths += [len(prompt.ids) + len(ids) for prompt, answers in pairs for ids, _, _ in answers]
    finally:
        engine.close()
    return statistics.median(seconds[2:]), int(statistics.mean(lengths))


def train(config: RunConfig, length: int, epochs: int, iterations: int, threads: int) -> float:
    """Returns the seconds of the models in one iteration on samples of `length` tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.set_num_threads(threads)
    path = config.model.path
    actor, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    critic, reward = (
        AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=1) for _ in range(2)
    )
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True) for model in (actor, critic)]
    rows = config.groups_per_iteration * config.group_size
    ids = torch.randint(0, actor.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(iterations):
        began = time.perf_counter()
        with torch.no_grad():
            for model in (reference.model, critic.model, reward.model):
                model(input_ids=ids)
        for _ in range(epochs):
            logprobs = actor(input_ids=ids).logits.log_softmax(-1).gather(2, ids[..., None])
            values = critic.score(critic.model(input_ids=ids).last_hidden_state)
            for loss, optimizer in zip((logprobs.exp().mean(), values.square().mean()), optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    engine_seconds, length = generate(config, options.iterations)
    train_seconds = train(config, length, options.epochs, options.iterations, options.threads)
    print(json.dumps({"generate": engine_seconds, "train": train_seconds, "length": length}))


if __name__ == "__main__":
    main()
