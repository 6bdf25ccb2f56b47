"""Runs TRL's GRPOTrainer on one task, in TRL's environment. Prints one JSON object with its steps and evaluations.

bench/peer.py runs it with the interpreter of a venv created from requirements/peer.txt. The clock counts training steps only, without model
loading and evaluations, as for Polyreme.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

arguments = argparse.ArgumentParser()
arguments.add_argument("--model", required=True)
arguments.add_argument("--train", required=True, help="JSON lines with `prompt` (templated text) and `answer`")
arguments.add_argument("--eval", required=True)
arguments.add_argument("--steps", type=int, required=True)
arguments.add_argument("--eval-interval", type=int, default=0)
arguments.add_argument("--eval-samples", type=int, default=200)
arguments.add_argument("--prompts", type=int, default=32)
arguments.add_argument("--group-size", type=int, default=8)
arguments.add_argument("--max-new-tokens", type=int, required=True)
arguments.add_argument("--lr", type=float, required=True)
arguments.add_argument("--after", default="", help="compare only what follows this marker")
arguments.add_argument("--seed", type=int, default=0)
arguments.add_argument("--threads", type=int, default=2)
options = arguments.parse_args()
os.environ.update(OMP_NUM_THREADS=str(options.threads), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

torch.set_num_threads(options.threads)


def read(path: str) -> list[dict]:
    with open(path) as lines:
        return [json.loads(line) for line in lines]


def right(completion: str, answer: str) -> float:
    return float((completion.partition(options.after)[2] if options.after else completion).strip() == answer)


class Clock(TrainerCallback):
    """Records the seconds of each step, and the greedy accuracy at intervals, which is not timed."""

    def __init__(self, rows: list[dict], tokenizer) -> None:
        self.rows, self.tokenizer = rows, tokenizer
        self.seconds: list[float] = []
        self.lengths: list[float] = []
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


tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
clock = Clock(read(options.eval)[: options.eval_samples], tokenizer)


def reward(completions, completion_ids, answer, **_):
    clock.lengths.append(statistics.mean(len(ids) for ids in completion_ids))
    return [right(completion, expected) for completion, expected in zip(completions, answer, strict=True)]


config = GRPOConfig(
    output_dir=tempfile.mkdtemp(),
    learning_rate=options.lr,
    lr_scheduler_type="constant",
    max_steps=options.steps,
    per_device_train_batch_size=options.prompts * options.group_size,
    num_generations=options.group_size,
    max_completion_length=options.max_new_tokens,
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
trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(read(options.train)), processing_class=tokenizer, callbacks=[clock])  # fmt: skip
trainer.train()
print(json.dumps({"step_seconds": clock.seconds, "mean_lengths": clock.lengths, "evaluations": clock.evaluations}))
