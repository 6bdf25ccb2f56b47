"""Runs TRL's GRPOTrainer on one task, in TRL's environment. Prints one JSON object with its steps and evaluations.

bench/peer.py runs it with the interpreter of a venv created from requirements/peer.txt. The clock counts training steps only, without model
loading and evaluations, as for Polyreme.
"""

import argparse
import json
import operator
import os
import runpy
import statistics
import tempfile
import time
from types import SimpleNamespace

arguments = argparse.ArgumentParser()
arguments.add_argument("--model", required=True)
arguments.add_argument("--train", required=True, help="JSON lines with `prompt` (templated text) and `answer`")
arguments.add_argument("--eval", default="")
arguments.add_argument("--steps", type=int, required=True)
arguments.add_argument("--eval-interval", type=int, default=0)
arguments.add_argument("--eval-samples", type=int, default=200)
arguments.add_argument("--prompts", type=int, default=32)
arguments.add_argument("--group-size", type=int, default=8)
arguments.add_argument("--max-new-tokens", type=int, required=True)
arguments.add_argument("--lr", type=float, required=True)
arguments.add_argument("--after", default="", help="compare only what follows this marker")
arguments.add_argument("--tool", default="", help="FILE:CLASS.METHOD as the tool of an environment: episodes of several turns")
arguments.add_argument("--turns", type=int, default=1)
arguments.add_argument("--seed", type=int, default=0)
arguments.add_argument("--threads", type=int, default=2)
options = arguments.parse_args()
os.environ.update(OMP_NUM_THREADS=str(options.threads), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.chat_template_utils import qwen3_template  # noqa: E402

torch.set_num_threads(options.threads)


def read(path: str) -> list[dict]:
    with open(path) as lines:
        return [json.loads(line) for line in lines]


def right(completion, answer: str) -> float:
    if options.tool:
        completion = completion[-1]["content"] if completion[-1]["role"] == "assistant" else ""
    return float((completion.partition(options.after)[2] if options.after else completion).strip() == answer)


class Clock(TrainerCallback):
    """Records the seconds of each step, and the greedy accuracy at intervals, which is not timed."""

    def __init__(self, rows: list[dict], tokenizer) -> None:
        self.rows, self.tokenizer = rows, tokenizer
        self.seconds: list[float] = []
        self.lengths: list[float] = []
        self.rewards: list[float] = []
        self.evaluations: list[dict] = []

    @torch.no_grad()
    def evaluate(self, model, step: int) -> None:
        if not options.eval_interval or step % options.eval_interval:
            return
        batch = self.tokenizer([row["prompt"] for row in self.rows], return_tensors="pt", padding=True)
        model.eval()
        output = model.generate(**{key: batch[key] for key in ("input_ids", "attention_mask")}, do_sample=False, max_new_tokens=options.max_new_tokens)  # fmt: skip
        model.train()
        texts = self.tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        accuracy = statistics.mean(right(text, row["answer"]) for text, row in zip(texts, self.rows, strict=True))
        self.evaluations.append({"step": step, "accuracy": accuracy, "train_seconds": sum(self.seconds)})

    def on_train_begin(self, args, state, control, model=None, **_):
        self.evaluate(model, 0)
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **_):
        self.seconds.append(time.perf_counter() - self.begun)
        self.evaluate(model, state.global_step)
        self.begun = time.perf_counter()


# The file as it is: AutoTokenizer chooses a class by the model's type, and with it other rules to split text.
tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model, padding_side="left")
clock = Clock(read(options.eval)[: options.eval_samples] if options.eval else [], tokenizer)


def reward(completions, completion_ids, answer, **_):
    clock.lengths.append(statistics.mean(len(ids) for ids in completion_ids))
    rewards = [right(completion, expected) for completion, expected in zip(completions, answer, strict=True)]
    clock.rewards.append(statistics.mean(rewards))
    return rewards


def with_tool() -> dict:
    """What a trainer with an environment gets: the method as its tool, the model's way to write a call, and conversations."""
    path, _, name = options.tool.rpartition(":")
    method = operator.attrgetter(name)(SimpleNamespace(**runpy.run_path(path)))
    tokenizer.response_template = qwen3_template
    return {"environment_factory": type("Tools", (), {"reset": lambda self, **row: None, method.__name__: method})}


rows = read(options.train)
if options.tool:
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
config = GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    learning_rate=options.lr,
    lr_scheduler_type="constant",
    max_steps=options.steps,
    per_device_train_batch_size=options.prompts * options.group_size,
    num_generations=options.group_size,
    max_completion_length=options.max_new_tokens,
    max_tool_calling_iterations=options.turns - 1,
    temperature=1.0,
    beta=0.0,
    bf16=False,
    use_cpu=True,
    gradient_checkpointing=False,
    save_strategy="no",
    report_to=[],
    logging_steps=1000,
    disable_tqdm=True,
    seed=options.seed,
)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[clock], **(with_tool() if options.tool else {}))  # fmt: skip
trainer.train()
means = {"mean_lengths": clock.lengths, "mean_rewards": clock.rewards}
print(json.dumps({"step_seconds": clock.seconds, **means, "evaluations": clock.evaluations}))
