"""Models, batches and optimizer steps of the accelerator bench: ours, and the same in plain torch."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from polyreme.config.load import parse_config
from polyreme.config.trainer import LoraConfig, Recompute
from polyreme_trainer.megatron.batches.batch import IGNORE
from polyreme_trainer.megatron.batches.packing import PackedIds
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.training.optimizer import Adam, Optimizer
from polyreme_trainer.memory.memory_estimate import learner_memory

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "long": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 8, "num_attention_heads": 14},
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
}
"""Of Qwen2.5's models, one with few layers and a small vocabulary for long sequences, and one for a processor."""
FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "L40S": 362e12}
"""Dense bfloat16 operations per second of NVIDIA's data sheets, by a part of the device's name."""
ADAM = Adam(beta2=0.98, eps=1e-4, weight_decay=0.1, clip_grad=0.3)  # eps: keeps rounding of tiny gradients from becoming steps
LR = 1e-3


@dataclass
class Place:
    """Where a part runs: a device, and a folder of its own."""

    device: Device
    folder: Path

    @property
    def on_cpu(self) -> bool:
        return self.device.kind == "cpu"

    @property
    def backend(self) -> Any:
        """torch.cuda or torch.npu."""
        return getattr(torch, self.device.kind)

    def seconds(self, work: Callable[[], object], rounds: int = 3, most: int = 20) -> float:
        """The median of the seconds of `work`, after one call that does not count: of `rounds` calls, on a device of up to `most` within a second."""
        found: list[float] = []
        while len(found) <= rounds or (not self.on_cpu and len(found) <= most and sum(found[1:]) < 1.0):
            self.device.synchronize()
            began = time.perf_counter()
            work()
            self.device.synchronize()
            found.append(time.perf_counter() - began)
        return statistics.median(found[1:])

    def peak(self, work: Callable[[], object]) -> int:
        """Bytes by which `work` raises the memory in use at its peak."""
        gc.collect()
        if self.on_cpu:
            Path("/proc/self/clear_refs").write_text("5")
            before = _resident("VmRSS")
            work()
            return _resident("VmHWM") - before
        self.backend.empty_cache()
        self.backend.reset_peak_memory_stats()
        before = self.backend.memory_allocated()
        work()
        self.device.synchronize()
        return int(self.backend.max_memory_allocated() - before)


@dataclass
class Rows:
    """Sequences of random tokens for a model: ids and targets, int64 [rows, width], padded on the right with 0."""

    vocab: int
    rows: int = 4
    width: int = 48
    ragged: bool = True
    ids: Tensor = field(init=False)
    targets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.ids = torch.randint(1, self.vocab, (self.rows, self.width), generator=torch.Generator().manual_seed(7))
        self.targets = self.ids.roll(-1, dims=1)
        for row in range(self.rows):
            length = self.width - 5 * row * self.ragged
            self.ids[row, length:], self.targets[row, length - 1 :] = 0, IGNORE

    def packed(self, device: torch.device) -> tuple[PackedIds, Tensor]:
        """The sequences without padding, one after the other, and their targets."""
        real = self.ids > 0
        return PackedIds(self.ids[real].to(device), tuple(real.sum(1).tolist())), self.targets[real].to(device)


def _resident(name: str) -> int:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) * 1024


def small_model(model_type: str, path: Path) -> Path:
    """Saves a random model whose numbers all matter, with heads that every kernel takes."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
    fields = {
        **SMALL,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields, **(experts if model_type.endswith("moe") else {}))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(path)
    return path


def policy_of(path: Path, dtype: str, place: Place, recompute: Recompute | None = None, lora: LoraConfig | None = None) -> Policy:
    policy = Policy(load_architecture(path), dtype, place.device, trainable=True, recompute=recompute, lora=lora)
    policy.load_hf(path)
    return policy


def random_policy(
    shape: str, place: Place, trainable: bool = True, lora: LoraConfig | None = None, recompute: Recompute | None = None
) -> Policy:
    """A Qwen2 of a shape with random weights, whose files are not needed."""
    arch = load_architecture(shape_config(shape, place))
    policy = Policy(arch, "bfloat16", place.device, trainable=trainable, recompute=recompute, lora=lora)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
    return policy


def shape_config(shape: str, place: Place) -> Path:
    vocab = 512 if shape in ("tiny", "long") else 151_936
    config = AutoConfig.for_model(
        "qwen2", **SHAPES[shape], num_key_value_heads=2 if shape != "7b" else 4, vocab_size=vocab,
        tie_word_embeddings=shape != "7b", max_position_embeddings=65_536,
    )  # fmt: skip
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(place.folder / shape)
    return place.folder / shape


def backward(policy: Policy, rows: Rows) -> Tensor:
    """Adds the gradient of the mean negative log-probability. Returns the log-probabilities, fp32 [k]."""
    logprobs = policy.logprobs(*rows.packed(policy.device.torch))
    (-logprobs.mean()).backward()
    return logprobs.detach()


def our_step(policy: Policy, optimizer: Optimizer, rows: Rows) -> tuple[Tensor, float]:
    """An optimizer step. Returns the log-probabilities before it, fp32 [k] on the processor, and the norm of the gradient."""
    optimizer.zero_grad()
    logprobs = backward(policy, rows)
    optimizer.set_lr(LR)
    norm = optimizer.step()
    return logprobs.cpu(), norm


def plain_logprobs(model: Any, rows: Rows) -> Tensor:
    targets = rows.targets.to(model.device)
    logits = model(input_ids=rows.ids.to(model.device)).logits.float()
    return torch.log_softmax(logits, dim=-1).gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)[targets != IGNORE]


def plain_step(model: Any, rows: Rows) -> tuple[Tensor, float]:
    """The same step as `_our_step` in plain torch."""
    parameters = list(model.parameters())
    decay = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": ADAM.weight_decay}]
    plain = [{"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decay + plain, lr=LR, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps)
    logprobs = plain_logprobs(model, rows)
    (-logprobs.mean()).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, ADAM.clip_grad))
    optimizer.step()
    return logprobs.detach(), norm


def plain_loop_step(model: Any, optimizer: torch.optim.Optimizer, rows: Rows) -> None:
    optimizer.zero_grad()
    (-plain_logprobs(model, rows).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def our_seconds(place: Place, shape: str, rows: Rows, train: bool = True, lora: LoraConfig | None = None) -> tuple[float, int]:
    """Seconds of an optimizer step, or of the log-probabilities alone, and the number of the model's weights."""
    policy = random_policy(shape, place, trainable=train, lora=lora)
    parameters = sum(each.numel() for each in policy.module.parameters())
    if train:
        return place.seconds(partial(our_step, policy, Optimizer(policy, Adam()), rows)), parameters
    with torch.no_grad():
        return place.seconds(partial(policy.logprobs, *rows.packed(place.device.torch))), parameters


def plain_model(place: Place, shape: str) -> Any:
    """transformers' model of a shape, with random weights, in bfloat16 on the device; its attention is torch's, flash where it has it."""
    gc.collect()
    with place.device.torch:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place.folder / shape), dtype=torch.bfloat16)


def plain_seconds(place: Place, shape: str, rows: Rows, train: bool = True) -> float:
    """The same with transformers' model and torch's AdamW."""
    model = plain_model(place, shape)
    if train:
        return place.seconds(partial(plain_loop_step, model, torch.optim.AdamW(model.parameters(), lr=LR), rows))
    with torch.no_grad():
        return place.seconds(partial(plain_logprobs, model, rows))


def share_of_peak(place: Place, shape: str, parameters: int, width: int, rate: float, passes: int) -> dict[str, float]:
    """The share of the device's operations per second that `rate` tokens per second need: in each pass 2 for each weight, and attention's. A
    step has three passes, one with a frozen base two. Empty for an unknown device."""
    name = "" if place.on_cpu else place.backend.get_device_name(0)
    peak = next((flops for part, flops in FLOPS.items() if part in name), None)
    size = SHAPES[shape]
    attention = 2 * size["num_hidden_layers"] * size["hidden_size"] * width  # causal: half of 4
    return {} if peak is None else {f"{shape}/share_of_peak": passes * (2 * parameters + attention) * rate / peak}


def peak_vs_estimate(shape: str, rows: Rows, place: Place) -> float:
    """The peak of the device's memory in an optimizer step, over what `polyreme config check --memory` says of the same run."""
    config = parse_config(
        {
            "device": place.device.kind, "iterations": 1, "groups_per_iteration": 1, "group_size": rows.rows,
            "model": {"path": str(place.folder / shape), "dtype": "bfloat16"},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 8},
            "rollout": {"max_new_tokens": rows.width - 8, "max_model_len": rows.width},
            "reward": {"rewards": [{"name": "exact"}]},
            "algorithm": {"preset": "grpo", "kl": None},
            "trainer": {"micro_batch_tokens": rows.ids.numel(), "optimizer": {"lr": LR}},
        },
        "the bench",
    )  # fmt: skip

    def work() -> None:
        policy = random_policy(shape, place)
        optimizer = Optimizer(policy, Adam())
        for _ in range(2):  # the first one makes the moments when its activations are gone
            our_step(policy, optimizer, rows)

    return place.peak(work) / learner_memory(config).rank.nbytes
