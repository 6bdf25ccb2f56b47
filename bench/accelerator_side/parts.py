"""The parts of bench/accelerator.py. Each runs in a process of its own: `python parts.py PART DEVICE FOLDER`.

Invariant: the last line of standard output is the part's figures, one JSON object. A part needs no other part.
"""

import gc
import json
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from polyreme.config.load import parse_config
from polyreme.config.trainer import LoraConfig, ParallelConfig, Recompute
from polyreme.weights.arena import Arena
from polyreme_trainer.doctor import verdicts
from polyreme_trainer.megatron.batches.batch import IGNORE
from polyreme_trainer.megatron.batches.packing import PackedIds
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.layers.logprobs import Head, token_logprobs
from polyreme_trainer.megatron.models.build import init_parallel, pick_spec
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.offload.offload import Movable
from polyreme_trainer.megatron.training.optimizer import Adam, Optimizer
from polyreme_trainer.memory.memory_estimate import learner_memory

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe")
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
}
"""Of Qwen2.5's models, and one for a processor."""
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

    def seconds(self, work: Callable[[], object], rounds: int = 3) -> float:
        """The median of the seconds of `work`, after one call that does not count."""
        found = []
        for _ in range(rounds + 1):
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


def doctor(place: Place) -> dict[str, Any]:
    """What `polyreme doctor` says of the learner's part of the machine."""
    found = list(verdicts(place.device.kind))
    bad = [f"{each.subject}: {each.found}" for each in found if each.level == "missing"]
    if bad:
        raise RuntimeError("; ".join(bad))
    return {each.subject: each.found for each in found}


def parity(place: Place) -> dict[str, Any]:
    """One optimizer step of each family against transformers on the processor in float32, in float32 and bfloat16 on the device."""
    figures: dict[str, float] = {}
    for name in FAMILIES:
        path = _small_model(name, place.folder / name)
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        rows = Rows(reference.config.vocab_size)
        before = {key: value.clone() for key, value in reference.state_dict().items()}
        want, want_norm = _plain_step(reference, rows)
        moved = sum(float((value - before[key]).double().square().sum()) for key, value in reference.state_dict().items()) ** 0.5
        for dtype in ("float32", "bfloat16"):
            policy = _policy(path, dtype, place)
            got, norm = _our_step(policy, Optimizer(policy, ADAM), rows)
            figures[f"{name}/{dtype}/logprob_error"] = float((got - want).abs().max())
            figures[f"{name}/{dtype}/gradient_norm_error"] = abs(norm / want_norm - 1)
            if dtype == "float32" and policy.arch.experts == 0:  # transformers stacks the matrices of experts
                after, full = reference.state_dict(), policy.full_tensors()
                assert full is not None
                error = sum(float((full[key].cpu() - after[key]).double().square().sum()) for key in full) ** 0.5
                figures[f"{name}/{dtype}/step_error"] = error / moved
    _within(figures, {"float32/logprob_error": 2e-4, "float32/gradient_norm_error": 1e-3, "step_error": 0.02})
    _within(figures, {"bfloat16/logprob_error": 0.3, "bfloat16/gradient_norm_error": 0.1})
    return figures


def packing(place: Place) -> dict[str, Any]:
    """Sequences that are packed together have the log-probabilities and gradients that each has alone, with the device's attention."""
    policy = _policy(_small_model("qwen2", place.folder), "bfloat16", place)
    rows = Rows(policy.arch.vocab, rows=4, width=256)
    together = policy.logprobs(*rows.packed(place.device.torch))
    alone = []
    for row in range(rows.rows):
        real = rows.ids[row] > 0
        ids, targets = (each[row][real].to(place.device.torch) for each in (rows.ids, rows.targets))
        alone.append(policy.logprobs(PackedIds(ids, (len(ids),)), targets))
    figures = {"logprob_error": float((together - torch.cat(alone)).detach().abs().max())}
    _within(figures, {"logprob_error": 0.1})
    return figures


def recompute(place: Place) -> dict[str, Any]:
    """Recomputed activations change no gradient and save memory."""
    path = _small_model("qwen2", place.folder)
    kinds: tuple[Recompute | None, ...] = (None, "selective", "full")
    figures: dict[str, float] = {}
    norms = []
    for kind in kinds:
        policy = _policy(path, "bfloat16", place, recompute=kind)
        rows, optimizer = Rows(policy.arch.vocab, rows=8, width=256), Optimizer(policy, ADAM)
        optimizer.zero_grad()
        figures[f"{kind or 'none'}/peak_mib"] = place.peak(partial(_backward, policy, rows)) / 2**20
        norms.append(optimizer.step())
    figures["gradient_norm_error"] = max(abs(norm / norms[0] - 1) for norm in norms)
    _within(figures, {"gradient_norm_error": 1e-3})
    return figures


def lora(place: Place) -> dict[str, Any]:
    """A step with adapters leaves the base as it was, bit by bit, and changes the model."""
    policy = _policy(_small_model("qwen2", place.folder), "bfloat16", place, lora=LoraConfig(rank=8))
    base = {name: tensor.clone() for name, tensor in policy.module.named_parameters() if not tensor.requires_grad}
    rows, optimizer = Rows(policy.arch.vocab), Optimizer(policy, ADAM)
    first, _ = _our_step(policy, optimizer, rows)
    second, _ = _our_step(policy, optimizer, rows)
    now = dict(policy.module.named_parameters())
    changed = sum(not torch.equal(now[name], tensor) for name, tensor in base.items())
    moved = float((second - first).abs().max())
    if changed or not moved:
        raise RuntimeError(f"expected a frozen base and a changed model; found {changed} changed tensors, and {moved} as change")
    return {"frozen_tensors": len(base), "logprob_change": moved}


def offload(place: Place) -> dict[str, Any]:
    """A learner's state leaves the device and comes back, with the same bits."""
    policy = _random_policy("tiny" if place.on_cpu else "0.5b", place)
    optimizer = Optimizer(policy, ADAM)
    before = [tensor.clone() for tensor in policy.module.parameters()]
    movable = Movable(lambda: [*policy.tensors(), *optimizer.tensors()], place.device.pins)
    seconds = {}
    place.device.synchronize()
    for name, move in (("leave", movable.leave), ("return", movable.come_back)):
        began = time.perf_counter()
        moved = move()
        place.device.synchronize()
        seconds[f"{name}_seconds"] = time.perf_counter() - began
    if not all(torch.equal(one, other) for one, other in zip(before, policy.module.parameters(), strict=True)):
        raise RuntimeError("expected the same bits after the return; found others")
    return {**seconds, "gib": moved / 2**30, "leave_gb_per_second": moved / seconds["leave_seconds"] / 1e9}


def speed(place: Place) -> dict[str, Any]:
    """Tokens per second of optimizer steps in bfloat16 against a plain torch loop, and the peak of memory against the estimate."""
    figures: dict[str, float] = {}
    for shape, count, width in (("tiny", 4, 128),) if place.on_cpu else (("0.5b", 8, 2048), ("1.5b", 4, 2048)):
        path = _config(shape, place)
        rows = Rows(json.loads((path / "config.json").read_text())["vocab_size"], count, width, ragged=False)
        ours, parameters = _our_seconds(place, shape, rows)
        rate = rows.ids.numel() / ours
        figures |= {f"{shape}/tokens_per_second": rate, f"{shape}/vs_torch": _plain_seconds(place, shape, rows) / ours}
        figures |= _share_of_peak(place, shape, parameters, width, rate)
        if not place.on_cpu:
            figures[f"{shape}/peak_vs_estimate"] = _peak_vs_estimate(shape, rows, place)
    return figures


def forward_7b(place: Place) -> dict[str, Any]:
    """Log-probabilities per second of a 7B shape in bfloat16, against transformers' model with log_softmax."""
    shape, width = ("tiny", 128) if place.on_cpu else ("7b", 2048)
    rows = Rows(json.loads((_config(shape, place) / "config.json").read_text())["vocab_size"], 2, width, ragged=False)
    ours, _ = _our_seconds(place, shape, rows, train=False)
    return {"tokens_per_second": rows.ids.numel() / ours, "vs_torch": _plain_seconds(place, shape, rows, train=False) / ours}


def head(place: Place) -> dict[str, Any]:
    """Log-probabilities of many tokens at a vocabulary of 152k, forward and backward: peak bytes over those of the whole logits."""
    tokens, hidden, vocab = (512 if place.on_cpu else 32_768), 256 if place.on_cpu else 1536, 151_936
    dtype = torch.float32 if place.on_cpu else torch.bfloat16
    states = torch.randn(tokens, hidden, dtype=dtype, device=place.device.torch, requires_grad=True)
    weight = (0.02 * torch.randn(vocab, hidden, dtype=dtype, device=place.device.torch)).requires_grad_()
    targets = torch.randint(vocab, (tokens,), device=place.device.torch)
    linear = pick_spec(place.device).linear

    def work() -> None:
        product = Head(lambda x, w: linear(x, w, None, None, False), 0, vocab, 1.0)
        (logprobs,) = token_logprobs(states, weight, targets, product)
        logprobs.mean().backward()

    peak = place.peak(work)
    return {"peak_mib": peak / 2**20, "peak_vs_logits": peak / (4 * tokens * vocab), "seconds": place.seconds(work)}


def arena(place: Place) -> dict[str, Any]:
    """GB/s between the shared memory of a version and the device, over those of a bare copy of page-locked memory."""
    nbytes = (64 if place.on_cpu else 1024) << 20
    shared = Arena.create(f"accelerator-{uuid.uuid4().hex[:8]}", nbytes)
    try:
        slot = torch.from_numpy(np.frombuffer(shared.slot_view(0), np.uint8))
        there = torch.zeros(nbytes, dtype=torch.uint8, device=place.device.torch)
        bare = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=place.device.pins)
        figures = {}
        for name, host in (("arena", slot), ("bare", bare)):
            figures[f"{name}_to_device_gb_per_second"] = nbytes / place.seconds(partial(there.copy_, host)) / 1e9
            figures[f"device_to_{name}_gb_per_second"] = nbytes / place.seconds(partial(host.copy_, there)) / 1e9
        del slot
        return figures
    finally:
        shared.close()


def loop(place: Place) -> dict[str, Any]:
    """The whole loop on one device: learner, transformers engine, reward and log, on the task of the demo."""
    example = ROOT / "examples" / "running_total"
    subprocess.run([sys.executable, example / "prepare.py"], check=True, timeout=120, stdout=sys.stderr)
    iterations = 3 if place.on_cpu else 20
    sets = [f"device={place.device.kind}", "rollout.engine=transformers", "trainer.parallel.tensor=1", f"iterations={iterations}"]
    sets += [f"output_dir={place.folder}", "eval_interval=10", "groups_per_iteration=16", "name=accelerator"]
    if place.on_cpu:
        sets += [
            f"trainer.sft=[{{data: {example}/data/sft_short.jsonl, steps: 20, batch_size: 16, lr: 2.0e-3}}]",
            "eval_samples=16",
            "eval_interval=3",
        ]
    argv = [sys.executable, "-m", "polyreme", "up", str(example / "run.yaml"), *sets]
    began = time.perf_counter()
    subprocess.run(argv, check=True, timeout=480, stdout=sys.stderr)
    rewards = list(_rewards(place.folder))
    figures = {"seconds": time.perf_counter() - began, "first_reward": rewards[0], "last_reward": statistics.mean(rewards[-3:])}
    if len(rewards) != iterations or (not place.on_cpu and figures["last_reward"] <= figures["first_reward"]):
        raise RuntimeError(f"expected {iterations} iterations with a rising reward; found {rewards}")
    return figures


PARTS: Mapping[str, Callable[[Place], dict[str, Any]]] = {
    part.__name__: part for part in (doctor, parity, packing, recompute, lora, offload, head, arena, speed, forward_7b, loop)
}


def _resident(name: str) -> int:
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(name))
    return int(line.split()[1]) * 1024


def _within(figures: Mapping[str, float], bounds: Mapping[str, float]) -> None:
    """Raises RuntimeError for a figure beyond the bound of the end of its name."""
    bad = [f"{name} = {value:.3g}, bound {bound:g}" for end, bound in bounds.items() for name, value in figures.items()
           if name.endswith(end) and not value <= bound]  # fmt: skip
    if bad:
        raise RuntimeError("; ".join(bad))


def _small_model(model_type: str, path: Path) -> Path:
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


def _policy(path: Path, dtype: str, place: Place, recompute: Recompute | None = None, lora: LoraConfig | None = None) -> Policy:
    policy = Policy(load_architecture(path), dtype, place.device, trainable=True, recompute=recompute, lora=lora)
    policy.load_hf(path)
    return policy


def _random_policy(shape: str, place: Place, trainable: bool = True) -> Policy:
    """A Qwen2 of a shape with random weights, whose files are not needed."""
    path = _config(shape, place)
    policy = Policy(load_architecture(path), "bfloat16", place.device, trainable=trainable)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
    return policy


def _config(shape: str, place: Place) -> Path:
    vocab = 512 if shape == "tiny" else 151_936
    config = AutoConfig.for_model(
        "qwen2", **SHAPES[shape], num_key_value_heads=2 if shape != "7b" else 4, vocab_size=vocab,
        tie_word_embeddings=shape != "7b", max_position_embeddings=4096,
    )  # fmt: skip
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(place.folder / shape)
    return place.folder / shape


def _backward(policy: Policy, rows: Rows) -> Tensor:
    """Adds the gradient of the mean negative log-probability. Returns the log-probabilities, fp32 [k]."""
    logprobs = policy.logprobs(*rows.packed(policy.device.torch))
    (-logprobs.mean()).backward()
    return logprobs.detach()


def _our_step(policy: Policy, optimizer: Optimizer, rows: Rows) -> tuple[Tensor, float]:
    """An optimizer step. Returns the log-probabilities before it, fp32 [k] on the processor, and the norm of the gradient."""
    optimizer.zero_grad()
    logprobs = _backward(policy, rows)
    optimizer.set_lr(LR)
    norm = optimizer.step()
    return logprobs.cpu(), norm


def _plain_logprobs(model: Any, rows: Rows) -> Tensor:
    targets = rows.targets.to(model.device)
    logits = model(input_ids=rows.ids.to(model.device)).logits.float()
    return torch.log_softmax(logits, dim=-1).gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)[targets != IGNORE]


def _plain_step(model: Any, rows: Rows) -> tuple[Tensor, float]:
    """The same step as `_our_step` in plain torch."""
    parameters = list(model.parameters())
    decay = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": ADAM.weight_decay}]
    plain = [{"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decay + plain, lr=LR, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps)
    logprobs = _plain_logprobs(model, rows)
    (-logprobs.mean()).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, ADAM.clip_grad))
    optimizer.step()
    return logprobs.detach(), norm


def _plain_loop_step(model: Any, optimizer: torch.optim.Optimizer, rows: Rows) -> None:
    optimizer.zero_grad()
    (-_plain_logprobs(model, rows).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _our_seconds(place: Place, shape: str, rows: Rows, train: bool = True) -> tuple[float, int]:
    """Seconds of an optimizer step, or of the log-probabilities alone, and the number of the model's weights."""
    policy = _random_policy(shape, place, trainable=train)
    parameters = sum(each.numel() for each in policy.module.parameters())
    if train:
        return place.seconds(partial(_our_step, policy, Optimizer(policy, Adam()), rows)), parameters
    with torch.no_grad():
        return place.seconds(partial(policy.logprobs, *rows.packed(place.device.torch))), parameters


def _plain_seconds(place: Place, shape: str, rows: Rows, train: bool = True) -> float:
    """The same with transformers' model and torch's AdamW."""
    gc.collect()
    config = AutoConfig.from_pretrained(place.folder / shape)
    with place.device.torch:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if train:
        return place.seconds(partial(_plain_loop_step, model, torch.optim.AdamW(model.parameters(), lr=LR), rows))
    with torch.no_grad():
        return place.seconds(partial(_plain_logprobs, model, rows))


def _share_of_peak(place: Place, shape: str, parameters: int, width: int, rate: float) -> dict[str, float]:
    """The share of the device's operations per second that a step needs: 6 for each weight, and attention's. Empty for an unknown device."""
    name = "" if place.on_cpu else place.backend.get_device_name(0)
    peak = next((flops for part, flops in FLOPS.items() if part in name), None)
    size = SHAPES[shape]
    attention = 6 * size["num_hidden_layers"] * size["hidden_size"] * width  # causal: half of 12
    return {} if peak is None else {f"{shape}/share_of_peak": (6 * parameters + attention) * rate / peak}


def _peak_vs_estimate(shape: str, rows: Rows, place: Place) -> float:
    """The peak of the device's memory in an optimizer step, over what `polyreme config check --memory` says of the same run."""
    config = parse_config(
        {
            "device": place.device.kind, "iterations": 1, "groups_per_iteration": 1, "group_size": 2,
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
        policy = _random_policy(shape, place)
        _our_step(policy, Optimizer(policy, Adam()), rows)

    return place.peak(work) / learner_memory(config).rank.nbytes


def _rewards(folder: Path) -> Iterator[float]:
    """The mean reward of each iteration of the run in a folder."""
    (path,) = folder.glob("*/metrics.jsonl")
    for line in path.read_text().splitlines():
        if "reward/mean" in (record := json.loads(line)):
            yield record["reward/mean"]


@contextmanager
def _joined(device: Device) -> Iterator[None]:
    init_parallel(ParallelConfig(), device)
    yield
    torch.distributed.destroy_process_group()


def main(part: str, kind: str, folder: str) -> None:
    device = Device(kind, threads=torch.get_num_threads())
    with _joined(device):
        print(json.dumps(PARTS[part](Place(device, Path(folder)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
