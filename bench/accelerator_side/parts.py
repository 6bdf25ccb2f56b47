"""The parts of bench/accelerator.py. Each returns its figures, needs no other part, and runs in a process of its own (`process.py`)."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerator_side.steps import (
    ADAM,
    LR,
    Place,
    Rows,
    backward,
    our_seconds,
    our_step,
    peak_vs_estimate,
    plain_loop_step,
    plain_model,
    plain_seconds,
    plain_step,
    policy_of,
    random_policy,
    shape_config,
    share_of_peak,
    small_model,
)
from transformers import AutoConfig, AutoModelForCausalLM

from polyreme.config.trainer import LoraConfig, ParallelConfig, Recompute
from polyreme.weights.arena import Arena
from polyreme_rollout.engine.transformers_engine import TransformersEngine
from polyreme_trainer.doctor import verdicts
from polyreme_trainer.megatron.batches.packing import PackedIds
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.layers.logprobs import Head, token_logprobs
from polyreme_trainer.megatron.models.build import init_parallel, pick_spec
from polyreme_trainer.megatron.offload.offload import Movable
from polyreme_trainer.megatron.training.optimizer import Adam, Optimizer

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe")


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
        path = small_model(name, place.folder / name)
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        rows = Rows(reference.config.vocab_size)
        before = {key: value.clone() for key, value in reference.state_dict().items()}
        want, want_norm = plain_step(reference, rows)
        moved = sum(float((value - before[key]).double().square().sum()) for key, value in reference.state_dict().items()) ** 0.5
        for dtype in ("float32", "bfloat16"):
            policy = policy_of(path, dtype, place)
            got, norm = our_step(policy, Optimizer(policy, ADAM), rows)
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
    policy = policy_of(small_model("qwen2", place.folder), "bfloat16", place)
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
    path = small_model("qwen2", place.folder)
    kinds: tuple[Recompute | None, ...] = (None, "selective", "full")
    figures: dict[str, float] = {}
    norms = []
    for kind in kinds:
        policy = policy_of(path, "bfloat16", place, recompute=kind)
        rows, optimizer = Rows(policy.arch.vocab, rows=8, width=256), Optimizer(policy, ADAM)
        optimizer.zero_grad()
        figures[f"{kind or 'none'}/peak_mib"] = place.peak(partial(backward, policy, rows)) / 2**20
        norms.append(optimizer.step())
    figures["gradient_norm_error"] = max(abs(norm / norms[0] - 1) for norm in norms)
    _within(figures, {"gradient_norm_error": 1e-3})
    return figures


def lora(place: Place) -> dict[str, Any]:
    """A step with adapters leaves the base as it was, bit by bit, and changes the model."""
    policy = policy_of(small_model("qwen2", place.folder), "bfloat16", place, lora=LoraConfig(rank=8))
    base = {name: tensor.clone() for name, tensor in policy.module.named_parameters() if not tensor.requires_grad}
    rows, optimizer = Rows(policy.arch.vocab), Optimizer(policy, ADAM)
    first, _ = our_step(policy, optimizer, rows)
    second, _ = our_step(policy, optimizer, rows)
    now = dict(policy.module.named_parameters())
    changed = sum(not torch.equal(now[name], tensor) for name, tensor in base.items())
    moved = float((second - first).abs().max())
    if changed or not moved:
        raise RuntimeError(f"expected a frozen base and a changed model; found {changed} changed tensors, and {moved} as change")
    return {"frozen_tensors": len(base), "logprob_change": moved}


def offload(place: Place) -> dict[str, Any]:
    """A learner's state leaves the device and comes back, with the same bits."""
    policy = random_policy("tiny" if place.on_cpu else "0.5b", place)
    optimizer = Optimizer(policy, ADAM)
    before = [tensor.clone() for tensor in policy.module.parameters()]
    movable = Movable(lambda: [*policy.tensors(), *optimizer.tensors()], place.device.pins)
    seconds = {}
    place.device.synchronize()
    for turn in ("first", "next"):  # the first one page-locks its memory on the host
        for name, move in (("leave", movable.leave), ("return", movable.come_back)):
            began = time.perf_counter()
            moved = move()
            place.device.synchronize()
            seconds[f"{turn}_{name}_seconds"] = time.perf_counter() - began
    if not all(torch.equal(one, other) for one, other in zip(before, policy.module.parameters(), strict=True)):
        raise RuntimeError("expected the same bits after the return; found others")
    return {**seconds, "gib": moved / 2**30, "leave_gb_per_second": moved / seconds["next_leave_seconds"] / 1e9}


def sleep(place: Place) -> dict[str, Any]:
    """A replica's model leaves the device and comes back with the same log-probabilities. On a processor it stays."""
    return asyncio.run(_sleep(place))


async def _sleep(place: Place) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(shape_config("tiny" if place.on_cpu else "1.5b", place))
    with place.device.torch:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    weights = sum(each.nbytes for each in model.state_dict().values())
    engine = TransformersEngine(model, place.folder, place.device.kind, max_model_len=256, max_num_seqs=8)
    await engine.open()
    ids = range(1, 200)
    before = await engine.logprobs(ids, "")
    await engine.pause()
    began = time.perf_counter()
    slept = await engine.sleep()
    asleep = time.perf_counter()
    await engine.wake()
    place.device.synchronize()
    awake = time.perf_counter()
    await engine.resume()
    same = await engine.logprobs(ids, "") == before
    engine.close()
    if not same or (not place.on_cpu and slept.freed < 0.9 * weights):
        raise RuntimeError(f"expected the same log-probabilities and {weights} free bytes; found {same}, and {slept.freed}")
    return {"sleep_seconds": asleep - began, "wake_seconds": awake - asleep, "freed_gib": slept.freed / 2**30}


def speed(place: Place) -> dict[str, Any]:
    """Tokens per second of optimizer steps in bfloat16 against a plain torch loop, and the peak of memory against the estimate."""
    figures: dict[str, float] = {}
    for shape, count, width in (("tiny", 4, 128),) if place.on_cpu else (("0.5b", 8, 2048), ("1.5b", 4, 2048)):
        path = shape_config(shape, place)
        rows = Rows(json.loads((path / "config.json").read_text())["vocab_size"], count, width, ragged=False)
        ours, parameters = our_seconds(place, shape, rows)
        rate = rows.ids.numel() / ours
        figures |= {f"{shape}/tokens_per_second": rate, f"{shape}/vs_torch": plain_seconds(place, shape, rows) / ours}
        figures |= share_of_peak(place, shape, parameters, width, rate, passes=3)
        if not place.on_cpu:
            figures[f"{shape}/peak_vs_estimate"] = peak_vs_estimate(shape, rows, place)
    return figures


def context(place: Place) -> dict[str, Any]:
    """Seconds and peak bytes of an optimizer step on one long sequence, over those of plain torch with its flash attention; for the longest also
    with recomputed MLPs."""
    shape, widths = ("tiny", (512, 1024)) if place.on_cpu else ("long", (2048, 8192, 12_000, 32_768))
    path = shape_config(shape, place)
    model = plain_model(place, shape)
    plain = partial(plain_loop_step, model, torch.optim.AdamW(model.parameters(), lr=LR))
    vocab = json.loads((path / "config.json").read_text())["vocab_size"]
    figures = {}
    kinds: tuple[tuple[Recompute | None, Sequence[int]], ...] = ((None, widths), ("selective", widths[-1:]))
    for kind, lengths in kinds:
        policy = random_policy(shape, place, recompute=kind)
        ours = partial(our_step, policy, Optimizer(policy, Adam()))
        for width in lengths:
            rows, name = Rows(vocab, 1, width, ragged=False), f"{width}{'/' + kind if kind else ''}"
            seconds, their_seconds = (place.seconds(partial(step, rows)) for step in (ours, plain))
            figures[f"{name}/time_over_torch"] = seconds / their_seconds
            if not place.on_cpu:  # so short a sequence is not seen in a process's memory
                peak, their_peak = (place.peak(partial(step, rows)) for step in (ours, plain))
                figures |= {f"{name}/peak_over_torch": peak / their_peak, f"{name}/peak_bytes_per_token": peak / width}
    return figures


def of_7b(place: Place) -> dict[str, Any]:
    """A 7B shape in bfloat16: log-probabilities per second against transformers' model with log_softmax, and steps with adapters."""
    shape, width = ("tiny", 128) if place.on_cpu else ("7b", 2048)
    rows = Rows(json.loads((shape_config(shape, place) / "config.json").read_text())["vocab_size"], 2, width, ragged=False)
    ours, parameters = our_seconds(place, shape, rows, train=False)
    figures = {
        "forward/tokens_per_second": rows.ids.numel() / ours,
        "forward/vs_torch": plain_seconds(place, shape, rows, train=False) / ours,
    }
    step, _ = our_seconds(place, shape, rows, lora=LoraConfig(rank=16))
    figures["lora/tokens_per_second"] = rows.ids.numel() / step
    for name, seconds, passes in (("forward", ours, 1), ("lora", step, 2)):
        share = share_of_peak(place, shape, parameters, width, rows.ids.numel() / seconds, passes)
        figures |= {f"{name}/share_of_peak": value for value in share.values()}
    return figures


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
    """GB/s from the device to the shared memory of a version and, as a reader, back, and those of a bare copy of page-locked memory."""
    nbytes = (64 if place.on_cpu else 1024) << 20
    shared = Arena.create(f"accelerator-{uuid.uuid4().hex[:8]}", nbytes)
    reader = Arena.open(shared.path)
    try:
        if place.device.kind == "cuda":
            shared.page_lock(torch)
            reader.page_lock(torch)
        slot, read = (np.frombuffer(each.slot_view(0), np.uint8) for each in (shared, reader))
        there = torch.zeros(nbytes, dtype=torch.uint8, device=place.device.torch)
        bare = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=place.device.pins)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # nothing writes to a reader's memory
            pairs = [("arena", torch.from_numpy(slot), torch.from_numpy(read)), ("bare", bare, bare)]
        figures = {}
        for name, written, source in pairs:
            figures[f"device_to_{name}_gb_per_second"] = nbytes / place.seconds(partial(written.copy_, there)) / 1e9
            figures[f"{name}_to_device_gb_per_second"] = nbytes / place.seconds(partial(there.copy_, source)) / 1e9
        return figures
    finally:
        reader.close()
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
    part.__name__: part
    for part in (doctor, parity, packing, recompute, lora, offload, sleep, head, arena, speed, context, of_7b, loop)
}


def _within(figures: Mapping[str, float], bounds: Mapping[str, float]) -> None:
    """Raises RuntimeError for a figure beyond the bound of the end of its name."""
    bad = [f"{name} = {value:.3g}, bound {bound:g}" for end, bound in bounds.items() for name, value in figures.items()
           if name.endswith(end) and not value <= bound]  # fmt: skip
    if bad:
        raise RuntimeError("; ".join(bad))


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


def run(part: str, kind: str, folder: Path) -> dict[str, Any]:
    """The figures of a part on a device. The variables of torch's rendezvous name a world of one rank."""
    device = Device(kind, threads=torch.get_num_threads())
    with _joined(device):
        return PARTS[part](Place(device, folder))
