"""Runs in the ranks of test_layouts: a role trains, saves and resumes on one layout; the test compares the files of all layouts."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from polyreme.config.trainer import LoraConfig, ParallelConfig, Recompute, RunMoeConfig
from polyreme.weights.digest import verify
from polyreme_trainer.algorithms.metrics import Metrics
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.batches.batch import MicroBatch, Routes, Sequences, supervised
from polyreme_trainer.megatron.checkpoints import checkpoint
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface.export import Export, export_hf
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank, hf_shapes, is_expert_bias, rank_slices
from polyreme_trainer.megatron.huggingface.lora_mapping import adapter_architecture
from polyreme_trainer.megatron.models.build import init_parallel
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.parallel.channel import BroadcastChannel
from polyreme_trainer.megatron.parallel.reshard import RankMesh, SavedShard, reshard
from polyreme_trainer.megatron.parallel.shard import data_shard
from polyreme_trainer.megatron.training.losses import over_ranks
from polyreme_trainer.megatron.training.optimizer import Adam
from polyreme_trainer.megatron.training.roles import LossTerm, Role
from polyreme_trainer.megatron.versions.version_writer import VersionWriter
from support import checkpoints

ADAM = Adam(beta2=0.98, eps=1e-4, weight_decay=0.1, clip_grad=0.3)  # eps: keeps rounding of tiny gradients from becoming steps
LENGTHS = (19, 7, 13, 10, 18)


def sequences(vocab: int) -> Sequences:
    """Rows of different lengths whose first three tokens are not trained on."""
    random = np.random.default_rng(7)
    masks = [np.arange(length) >= 3 for length in LENGTHS]
    rows = [random.integers(1, vocab, length, dtype=np.int32) for length in LENGTHS]
    return supervised(rows, [mask.astype(np.uint8) for mask in masks])


def make_role(
    model: str,
    dtype: str,
    device: Device,
    lora: dict[str, Any] | None = None,
    recompute: Recompute | None = None,
    moe: dict[str, Any] | None = None,
) -> Role[Policy]:
    """The actor of a Hugging Face directory. A micro-batch has at most two of the rows. `lora`, `moe`: sections of the configuration."""
    adapters = None if lora is None else LoraConfig.model_validate(lora)
    section = RunMoeConfig.model_validate(moe or {})
    arch = load_architecture(Path(model))
    policy = Policy(arch, dtype, device, trainable=True, lora=adapters, recompute=recompute, moe=section)
    policy.load_hf(Path(model))
    role = Role("actor", policy, lambda batch: policy.logprobs(batch.ids, batch.targets, 0.9), data_shard(36, device))
    role.make_optimizer(ADAM)
    role.replays = section.replay_routes
    return role


def routes(arch: Architecture) -> list[Routes]:
    """Random experts for the trained tokens of `sequences`."""
    shapes = [(length - 3, arch.expert_layers, arch.experts) for length in LENGTHS]
    random = np.random.default_rng(8)
    return [random.random(shape).argsort(-1)[..., : arch.top_k].astype(np.uint8) for shape in shapes]


def step(role: Role[Policy]) -> tuple[float, float]:
    """One optimizer step on `sequences`. Returns its loss and the gradient norm."""
    rows = sequences(role.model.arch.vocab)
    if role.replays:
        rows = replace(rows, routes=routes(role.model.arch))
    count = float(rows.trained.sum())

    def loss(batch: MicroBatch, logprobs: Tensor) -> tuple[Tensor, Metrics]:
        weight = batch.take(np.cos(np.arange(len(rows.mask), dtype=np.float32)))  # positive and negative, as advantages are
        value = -(logprobs * weight).sum() / count
        return value, {"loss": (value.detach(), torch.ones(()))}

    metrics = role.forward_backward(LossTerm(rows, np.arange(len(rows)), loss))
    norm = role.optim_step(1e-2)
    return over_ranks(role.shard, metrics)["loss"][0], norm


def run_orders(script: str) -> None:
    """Runs a script: {model, dtype, out, layout: [tensor, data], runs: [{resume: path | null, steps, save: {step: path}, lora: of the
    configuration | absent, recompute, moe: likewise, model, dtype: others than the script's | absent}]}.

    Rank 0 writes {runs: [[[loss, norm] of each step]], state_bytes: of rank 0} to `out`.
    """
    order: dict[str, Any] = json.loads(script)
    device = Device("cpu")
    init_parallel(ParallelConfig(**order["layout"]), device)
    runs, role = [], None
    for run in order["runs"]:
        model, dtype = run.get("model", order["model"]), run.get("dtype", order["dtype"])
        role = make_role(model, dtype, device, run.get("lora"), run.get("recompute"), run.get("moe"))
        if run["resume"] is not None:
            step(role)  # makes weights and moments that the checkpoint must replace
            found = checkpoint.read(Path(run["resume"]))
            assert found is not None and found.intact()
            checkpoint.load(found, [role])
        measured = []
        for number in range(run["steps"] + 1):
            if number:
                measured.append(step(role))
            if str(number) in run["save"]:
                checkpoints.save(Path(run["save"][str(number)]), [role], {})
        runs.append(measured)
        if role.model.routing is not None:
            check_biases(role)
    assert role is not None and role.optimizer is not None
    if torch.distributed.get_rank() == 0:
        Path(order["out"]).write_text(json.dumps({"runs": runs, "state_bytes": role.optimizer.state_bytes}))


def saved_state(model: Path, path: Path) -> dict[str, dict[str, Tensor]]:
    """Kind of state -> Hugging Face name -> the whole tensor in a checkpoint of the actor from any layout. With adapters, the names are
    those
    of the adapters."""
    found = checkpoint.read(path)
    assert found is not None and found.intact()
    arch, here = load_architecture(model), Rank()
    if "lora" in found.layout:
        arch = adapter_architecture(arch, LoraConfig.model_validate(found.layout["lora"]))
    layout = RankMesh(**{field.name: found.layout[field.name] for field in fields(RankMesh)})
    states = {number: torch.load(path / f"state-{number}.pt", weights_only=True)["actor"] for number in range(layout.ranks)}
    shards = [SavedShard(arch, files, states) for files in layout.files(here)]
    names = sorted({piece.param for piece in rank_slices(arch, here)})
    kinds = ["weights", "exp_avg", "exp_avg_sq"] + (["master"] if found.layout["dtype"] == "bfloat16" else [])
    state = {}
    for kind in kinds:
        chosen = [name for name in names if kind == "weights" or not is_expert_bias(name)]
        params, shapes = reshard(arch, kind, chosen, here, shards), hf_shapes(arch)
        pieces = [piece for piece in rank_slices(arch, here) if piece.param in params]
        state[kind] = {piece.hf_name: torch.empty(shapes[piece.hf_name], dtype=params[piece.param].dtype) for piece in pieces}
        for piece in pieces:
            state[kind][piece.hf_name][piece.hf_index] = params[piece.param][piece.param_index]
    return state


def check_biases(role: Role[Policy]) -> None:
    """All ranks that have a layer have the same bits in its expert bias. Collective."""
    assert role.model.routing is not None
    mine = {layer: bias.numpy().tobytes() for layer, bias in role.model.routing.biases.items()}
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    found = {layer for each in every for layer in each}
    assert found == (set(range(role.model.arch.expert_layers)) if role.model.arch.family.scores == "sigmoid" else set())
    assert all(len({each[layer] for each in every if layer in each}) == 1 for layer in found)


def push_and_export(model: str, folder: str, layout: str) -> None:
    """A trained version in the arena, written by all stages, tensor ranks and expert ranks, equals the exported model bit by bit."""
    device = Device("cpu")
    init_parallel(ParallelConfig(**json.loads(layout)), device)
    role, number = make_role(model, "float32", device), torch.distributed.get_rank()
    step(role)
    ranks = Ranks(number, BroadcastChannel(device.torch))
    writer = VersionWriter(role.model, ranks, f"layouts-{os.getpid()}", writes=role.model.writes).open()
    try:
        written = writer.write(0, version=1, term=1)
        full = role.model.full_tensors()
        if number:
            assert full is None
            return
        assert full is not None and written.manifest is not None
        verify(written.manifest, writer.arena.slot_view(0))
        export_hf(Path(folder) / "hf", Export(full, {"config.json": (Path(model) / "config.json").read_bytes()}))
        pushed, exported = writer.tensors(0), load_file(Path(folder) / "hf" / "model.safetensors")
        before = load_file(Path(model) / "model.safetensors")
        assert pushed.keys() == exported.keys() == before.keys()
        assert all(torch.equal(pushed[name], exported[name]) for name in exported)
        assert not any(torch.equal(before[name], exported[name]) for name in exported)
    finally:
        torch.distributed.barrier()
        writer.close()
        ranks.close()
