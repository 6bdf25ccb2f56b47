"""GRPO from scratch: the whole algorithm on one page, over an engine that trains and a sampler that answers.

    python examples/running_total/prepare.py      # the demo's model (0.8M random weights) and its data
    python examples/rl_loop.py

Both are in this process, or with POLYREME_ADDRESS=http://HOST:PORT on a training service, whose key is in TINKER_API_KEY (docs/serve.md).
Result, in about 160 seconds of one core: the held-out accuracy of greedy answers rises from 0.31 after the warm start to 1.00 after 32
iterations. `polyreme up` runs the same algorithm over processes and machines.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.rundir.input_files import read_model_files
from polyreme_rollout.local import LocalSampler, Sampled
from polyreme_trainer.algorithms.objective import StageInputs
from polyreme_trainer.data.prompt_store import Prompt
from polyreme_trainer.data.prompts import load_prompts
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.template import Template
from polyreme_trainer.learner.engine import RowsLoss
from polyreme_trainer.learner.learning_rate import learning_rate
from polyreme_trainer.local import LocalEngine
from polyreme_trainer.remote import RemoteAnswer, RemoteService
from polyreme_trainer.stages.warm_start import read_examples, run_phase

CONFIG = Path(__file__).parent / "running_total" / "run.yaml"
Engine, Sampler, Answer = LocalEngine | RemoteService, LocalSampler | RemoteService, Sampled | RemoteAnswer
SETTINGS = ("rollout.engine=transformers", "rollout.transformers.threads=2", "trainer.parallel={threads: 2}")


class GrpoLoss:
    """The loss of a micro-batch: each token of an answer is made more likely if the answer was better than the others to its prompt.

    On the first step after sampling, the ratio to the policy that sampled is 1, so clipping it would change nothing; its gradient is that of
    the log-probability. The engine adds up micro-batches, so the divisor is the number of tokens of the whole step.
    """

    head = "language"
    needs_reference = needs_baseline = False

    def loss(self, inputs: StageInputs) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """`inputs.output`: the log-probability of each sampled token, with gradient."""
        advantage = inputs.columns["advantage"][inputs.sequence]
        ratio = torch.exp(inputs.output - inputs.output.detach())
        total = -(ratio * advantage).sum()
        return total / inputs.tokens, {"loss": (total.detach(), torch.tensor(float(len(advantage))))}


def reward(text: str, label: str) -> float:
    """1 if what follows the first # is the right digit. Nothing rewards careful answers directly."""
    return float(text.partition("#")[2].strip() == label)


def advantages(scores: np.ndarray) -> np.ndarray:
    """How much better each answer is than its group, float32 [groups * size], from scores [groups, size].

    A group of equal scores has nothing to learn from: its advantages are 0.
    """
    centred = scores - scores.mean(axis=1, keepdims=True)
    return (centred / (scores.std(axis=1, ddof=1, keepdims=True) + 1e-4)).astype(np.float32).ravel()


def training_rows(prompts: list[Prompt], answers: Sequence[Answer], advantage: np.ndarray) -> StageRows:
    """Prompts with their answers, as the engine trains on them: only the sampled tokens count."""
    ids = [np.array([*prompt.ids, *answer.ids], dtype=np.int32) for prompt, answer in zip(prompts, answers, strict=True)]
    mask = [np.arange(len(row)) >= len(prompt.ids) for row, prompt in zip(ids, prompts, strict=True)]
    return StageRows(ids, [each.astype(np.uint8) for each in mask], columns={"advantage": advantage})


def warm_start(engine: Engine, config: RunConfig) -> None:
    """Supervised training by the same engine: the random model learns the task's form, and mostly to guess."""
    files = read_model_files(config.model.path)
    for number, phase in enumerate(config.trainer.sft):
        engine.begin_phase(phase)
        rows = read_examples(phase.data, config, files)
        for record in run_phase(engine, phase, rows, config.seed, number):
            print(f"phase {record.phase}, step {record.step}: loss {record.loss:.3f}", flush=True)


def accuracy(sampler: Sampler, prompts: list[Prompt], template: Template) -> float:
    """The share of right greedy answers."""
    answers = sampler.sample([prompt.ids.tolist() for prompt in prompts], template.stop_ids, temperature=0.0)
    texts = template.decode([answer.ids for answer in answers], special=False)
    return float(np.mean([reward(text, prompt.label) for text, prompt in zip(texts, prompts, strict=True)]))


@contextmanager
def opened(config: RunConfig, address: str) -> Iterator[tuple[Engine, Sampler]]:
    """The engine and the sampler, in this process or at an address."""
    if address:
        with RemoteService.open(config, address) as service:
            yield service, service
    else:
        with LocalEngine.open(config) as engine, LocalSampler.open(config) as sampler:
            yield engine, sampler


def main(config: RunConfig) -> tuple[float, float]:
    """Trains. Returns the held-out accuracy before and after the iterations."""
    template = Template(read_model_files(config.model.path), config.data)
    train = list(load_prompts(config.data.train, config.data, template).prompts)
    held_out = list(load_prompts(config.data.eval, config.data, template).prompts)[: config.eval_samples]
    rng, size = np.random.default_rng(config.seed), config.group_size
    with opened(config, os.environ.get("POLYREME_ADDRESS", "")) as (engine, sampler):
        warm_start(engine, config)
        engine.begin_iterations()
        sampler.load(engine.publish(0))
        before = accuracy(sampler, held_out, template)
        print(f"warm start done: held-out accuracy {before:.3f}", flush=True)
        for iteration in range(1, config.iterations + 1):
            # Sample: a group of answers to each prompt, from the newest policy.
            prompts = [train[i] for i in rng.choice(len(train), config.groups_per_iteration, replace=False) for _ in range(size)]
            answers = sampler.sample([prompt.ids.tolist() for prompt in prompts], template.stop_ids, seed=iteration)
            # Score: compare each answer with the others of its group.
            texts = template.decode([answer.ids for answer in answers], special=False)
            scores = np.array([reward(text, prompt.label) for text, prompt in zip(texts, prompts, strict=True)])
            advantage = advantages(scores.reshape(-1, size))
            # Train: one optimizer step.
            metrics = engine.forward_backward("actor", training_rows(prompts, answers, advantage), RowsLoss(GrpoLoss()))
            moved = engine.optim_step("actor", learning_rate(config.trainer.optimizer, iteration, config.iterations))
            # Publish: the sampler answers with the new weights from now on.
            sampler.load(engine.publish(iteration))
            numbers = {"loss": engine.means(metrics)["loss"], "gradient": moved["grad_norm"]}
            print(f"iteration {iteration}: reward {scores.mean():.3f}", *(f"{k} {v:.3g}" for k, v in numbers.items()), flush=True)
        after = accuracy(sampler, held_out, template)
        print(f"held-out accuracy: {before:.3f} before, {after:.3f} after {config.iterations} iterations")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO from scratch.")
    parser.add_argument("overrides", nargs="*", help="Keys of running_total/run.yaml with other values: iterations=8")
    main(load_config(CONFIG, [*SETTINGS, *parser.parse_args().overrides]))
