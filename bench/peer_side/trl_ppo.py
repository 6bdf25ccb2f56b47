"""Runs TRL's PPOTrainer with four models on one task, in TRL's environment. Prints one JSON object with its step seconds.

bench/peer_ppo.py runs it with the interpreter of a venv created from requirements/peer-ppo.txt. The clock excludes model loading.
"""

import argparse
import json
import os
import tempfile
import time

arguments = argparse.ArgumentParser()
arguments.add_argument("--model", required=True, help="policy, reference and body of the critic")
arguments.add_argument("--reward-model", required=True)
arguments.add_argument("--train", required=True, help="JSON lines with `prompt` (templated text)")
arguments.add_argument("--steps", type=int, required=True)
arguments.add_argument("--samples", type=int, required=True)
arguments.add_argument("--epochs", type=int, required=True)
arguments.add_argument("--max-new-tokens", type=int, required=True)
arguments.add_argument("--kl-coef", type=float, required=True)
arguments.add_argument("--lr", type=float, required=True)
arguments.add_argument("--seed", type=int, default=0)
arguments.add_argument("--threads", type=int, default=2)
options = arguments.parse_args()
os.environ.update(
    OMP_NUM_THREADS=str(options.threads), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1"
)

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback  # noqa: E402
from trl.experimental.ppo import PPOConfig, PPOTrainer  # noqa: E402

torch.set_num_threads(options.threads)


class Clock(TrainerCallback):
    """Records the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_begin(self, args, state, control, **_):
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        now = time.perf_counter()
        self.seconds.append(now - self.begun)
        self.begun = now
        return control


tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")


def classifier(path: str):
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    return model


def language_model():
    return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)


critic = classifier(options.model)
torch.nn.init.zeros_(critic.score.weight)
clock = Clock()
config = PPOConfig(
    output_dir=tempfile.mkdtemp(),
    learning_rate=options.lr,
    lr_scheduler_type="constant",
    total_episodes=options.steps * options.samples,
    per_device_train_batch_size=options.samples,
    gradient_accumulation_steps=1,
    local_rollout_forward_batch_size=options.samples,
    num_mini_batches=1,
    num_ppo_epochs=options.epochs,
    response_length=options.max_new_tokens,
    stop_token="eos",
    temperature=1.0,
    kl_coef=options.kl_coef,
    num_sample_generations=0,
    bf16=False,
    use_cpu=True,
    gradient_checkpointing=False,
    save_strategy="no",
    eval_strategy="no",
    report_to=[],
    logging_steps=1000,
    disable_tqdm=True,
    seed=options.seed,
)
with open(options.train) as lines:
    prompts = Dataset.from_list([{"input_ids": tokenizer(json.loads(line)["prompt"])["input_ids"]} for line in lines])
PPOTrainer(
    args=config,
    processing_class=tokenizer,
    model=language_model(),
    ref_model=language_model(),
    reward_model=classifier(options.reward_model),
    value_model=critic,
    train_dataset=prompts,
    eval_dataset=prompts.select(range(8)),
    callbacks=[clock],
).train()
print(json.dumps({"step_seconds": clock.seconds}))
