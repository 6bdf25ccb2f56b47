"""Runs in the ranks of test_model_parity. Each function is one program with assertions, which all ranks run."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyreme.config.trainer import ParallelConfig, Recompute
from polyreme.errors import ConfigError, RunFailedError
from polyreme.rundir.checkpoint_manifest import checkpoint_path
from polyreme_trainer.megatron.batches.batch import IGNORE, Sequences, pack
from polyreme_trainer.megatron.batches.packing import PackedIds
from polyreme_trainer.megatron.checkpoints import checkpoint
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.export import Export, export_hf
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.layers.accelerator import CUDA
from polyreme_trainer.megatron.layers.cpu.spec import CPU
from polyreme_trainer.megatron.mcore import parallel_state
from polyreme_trainer.megatron.models.build import init_parallel
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.parallel.shard import DataShard
from polyreme_trainer.megatron.training.optimizer import Adam, Optimizer
from polyreme_trainer.megatron.training.roles import Role
from support import checkpoints

TOLERANCE = 1e-5


def start(tensor: str, data: str = "1") -> Device:
    device = Device("cpu")
    init_parallel(ParallelConfig(tensor=int(tensor), data=int(data)), device)
    return device


def policy_of(model: str, device: Device, trainable: bool = True) -> Policy:
    policy = Policy(load_architecture(Path(model)), "float32", device, trainable=trainable)
    policy.load_hf(Path(model))
    return policy


def hf_model(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def file_tensors(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of the model's files, which have separate matrices for each expert. In memory, transformers stacks them."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            for number, expert in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                    found[name.replace("gate_up_proj", f"{number}.{part}.weight")] = half
        elif name.endswith(".experts.down_proj"):
            for number, expert in enumerate(tensor):
                found[name.replace("down_proj", f"{number}.down_proj.weight")] = expert
        else:
            found[name] = tensor
    if model.config.model_type == "mixtral":
        renamed = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        found = {".".join(renamed.get(part, part) for part in name.split(".")): tensor for name, tensor in found.items()}
    return found


def batch(vocab: int, rows: int = 4, width: int = 19) -> tuple[Tensor, Tensor]:
    """ids and targets of right-padded sequences of different lengths; a prompt of 3 tokens is not trained on.

    Token 0 is the padding token and occurs nowhere else, since transformers computes no gradient for its embedding.
    """
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(1, vocab, (rows, width), generator=generator)
    targets = ids.roll(-1, dims=1)
    for row in range(rows):
        length = width - 3 * row
        ids[row, length:] = 0
        targets[row, length - 1 :] = IGNORE
        targets[row, :3] = IGNORE
    return ids, targets


def packed(ids: Tensor, targets: Tensor) -> tuple[PackedIds, Tensor]:
    """The same sequences without their padding, and their targets."""
    real = ids > 0
    return PackedIds(ids[real], tuple(real.sum(1).tolist())), targets[real]


def every_check(model: str, tensor: str, data: str, folder: str) -> None:
    device = start(tensor, data)
    logits_and_logprobs_agree(model, device)
    training_agrees_with_plain_torch(model, device)
    slices_fill_shared_views(model, device, folder)
    export_loads_in_transformers(model, device, folder)
    resumed_training_is_bit_identical(model, device, folder)


def logits_and_logprobs_agree(model: str, device: Device) -> None:
    policy, reference = policy_of(model, device), hf_model(model)
    ids, targets = batch(policy.arch.vocab)
    with torch.no_grad():
        expected = reference(ids).logits
    real = ids > 0
    torch.testing.assert_close(policy.logits(ids)[real], expected[real], rtol=0, atol=TOLERANCE)
    for temperature in (1.0, 0.7):
        got = policy.logprobs(ids, targets, temperature)
        distribution = torch.distributions.Categorical(logits=expected / temperature)
        trained = targets != IGNORE
        want = distribution.log_prob(targets.clamp(min=0))[trained]
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(policy.logprobs(*packed(ids, targets), temperature), want, rtol=0, atol=TOLERANCE)
    frozen = Policy(policy.arch, policy.dtype, policy.device, trainable=False, spec=policy.spec)
    frozen.load_state_dict(policy.weights())
    assert not frozen.logprobs(ids, targets).requires_grad
    torch.testing.assert_close(frozen.logprobs(ids, targets), policy.logprobs(ids, targets).detach(), rtol=0, atol=1e-6)


def train(policy: Policy, optimizer: Optimizer, steps: int) -> list[float]:
    """Runs optimizer steps on `batch`, whose rows are distributed over the data ranks, one row per micro-batch."""
    data_rank, data = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    ids, targets = batch(policy.arch.vocab)
    tokens = (targets != IGNORE).sum()
    weight = torch.linspace(-1, 1, ids.numel()).view(ids.shape)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        for row in range(data_rank, len(ids), data):
            logprobs = policy.logprobs(ids[row : row + 1], targets[row : row + 1], 0.9)
            (-(logprobs * weight[row][targets[row] != IGNORE]).sum() / tokens).backward()
        optimizer.set_lr(1e-2)
        norms.append(optimizer.step())
    return norms


def role_of(model: str, device: Device, adam: Adam | None = None) -> Role[Policy]:
    """A trained role that only `train_role` runs."""
    policy = policy_of(model, device)
    role = Role("actor", policy, lambda batch: policy.logprobs(batch.ids, batch.targets), DataShard(device.torch, 1024))
    role.make_optimizer(adam or ADAM)
    return role


def train_role(role: Role[Policy], steps: int) -> None:
    assert role.optimizer is not None
    train(role.model, role.optimizer, steps)


def hf_train(model: Any, steps: int, adam: Adam) -> list[float]:
    """Runs the same steps in plain torch."""
    parameters = list(model.parameters())
    decay = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": adam.weight_decay}]
    plain = [{"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decay + plain, lr=1e-2, betas=(adam.beta1, adam.beta2), eps=adam.eps)
    ids, targets = batch(model.config.vocab_size)
    weight = torch.linspace(-1, 1, ids.numel()).view(ids.shape) * (targets != IGNORE)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        logprobs = torch.log_softmax(model(ids).logits / 0.9, dim=-1).gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)
        (-(logprobs * weight).sum() / (targets != IGNORE).sum()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, adam.clip_grad)))
        optimizer.step()
    return norms


ADAM = Adam(beta2=0.98, eps=1e-4, weight_decay=0.1, clip_grad=0.3)  # eps: keeps rounding of tiny gradients from becoming steps


def training_agrees_with_plain_torch(model: str, device: Device) -> None:
    policy, reference = policy_of(model, device), hf_model(model)
    norms = train(policy, Optimizer(policy, ADAM), steps=3)
    for got, want in zip(norms, hf_train(reference, 3, ADAM), strict=True):
        assert math.isclose(got, want, rel_tol=1e-5), (got, want)
    full = policy.full_tensors()
    if full is not None:
        expected = file_tensors(reference, reference.state_dict())
        assert full.keys() == expected.keys() - hf_mapping.hf_aliases(policy.arch).keys()
        for name, tensor_ in full.items():
            torch.testing.assert_close(tensor_, expected[name], rtol=0, atol=TOLERANCE, msg=partial("{}: {}".format, name))


def recomputed_gradients_are_the_same(model: str, tensor: str) -> None:
    """Gradients are equal bit by bit with both specs, and more recomputation saves less for the backward pass."""
    device = start(tensor)
    architecture = load_architecture(Path(model))
    ids, targets = batch(architecture.vocab)
    kinds: list[Recompute | None] = [None, "selective", "full"]
    for spec in (CPU, CUDA):
        found = []
        for recompute in kinds:
            policy = Policy(architecture, "float32", device, trainable=True, spec=spec, recompute=recompute)
            policy.load_hf(Path(model))
            Optimizer(policy, ADAM).zero_grad()
            saved: dict[int, int] = {}  # address -> bytes
            with device.megatron():
                with torch.autograd.graph.saved_tensors_hooks(partial(_note, saved), lambda tensor: tensor):
                    loss = policy.logprobs(ids, targets).sum()
                loss.backward()
            grads = {name: param.main_grad.clone() for name, param in policy.module.named_parameters()}
            found.append((sum(saved.values()), grads))
        (most, expected), *others = found
        for less, grads in others:
            assert less < most
            most = less
            assert all(torch.equal(grads[name], expected[name]) for name in expected)
        assert any(grad.abs().max() > 0 for grad in expected.values())


def joined_beginnings_have_the_same_gradients(model: str, tensor: str) -> None:
    """Log-probabilities and gradients of sequences that share their first tokens, with both specs."""
    device = start(tensor)
    architecture = load_architecture(Path(model))
    ids = batch(architecture.vocab)[0]
    ids[:, :6] = ids[0, :6]
    rows = [row[row > 0].numpy() for row in ids]
    sequences = Sequences(rows, np.concatenate([np.arange(len(row) - 1) >= 5 for row in rows]).astype(np.float32))
    for spec in (CPU, CUDA):
        policy = Policy(architecture, "float32", device, trainable=True, spec=spec)
        policy.load_hf(Path(model))
        optimizer, found = Optimizer(policy, ADAM), []
        assert policy.joins_beginnings
        for joins in (False, True):
            micro_batch = pack(sequences, np.arange(len(rows)), device.torch, joins_beginnings=joins)
            optimizer.zero_grad()
            with device.megatron():
                logprobs = policy.logprobs(micro_batch.ids, micro_batch.targets)
                (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
            found.append((logprobs.detach(), *(param.main_grad.clone() for param in policy.module.parameters())))
            assert len(micro_batch.targets) == sum(map(len, rows)) - len(rows) - joins * 5 * (len(rows) - 1)
        for joined, whole in zip(*found, strict=True):
            torch.testing.assert_close(joined, whole, rtol=0, atol=TOLERANCE)
        assert all(grad.abs().max() > 100 * TOLERANCE for grad in found[1][1:])


def _note(saved: dict[int, int], tensor: Tensor) -> Tensor:
    """Records the bytes of a saved tensor's storage, once per storage."""
    saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return tensor


def slices_fill_shared_views(model: str, device: Device, folder: str) -> None:
    """The ranks of data rank 0 write their slices into one shared file; together they are the model."""
    policy = policy_of(model, device)
    shapes = hf_mapping.hf_shapes(policy.arch)
    size = sum(math.prod(shape) for shape in shapes.values())
    path = Path(folder) / "views"
    first = torch.distributed.get_rank() == 0
    if first:
        path.write_bytes(b"\xff" * size * 4)
    torch.distributed.barrier()
    flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.float32)
    views = {
        name: part.view(shape)
        for (name, shape), part in zip(shapes.items(), flat.split([math.prod(s) for s in shapes.values()]), strict=True)
    }
    if parallel_state.get_data_parallel_rank() == 0:
        policy.write_slices(views)
    torch.distributed.barrier()
    expected = load_file(Path(model) / "model.safetensors")
    assert all(torch.equal(views[name], expected[name]) for name in shapes)


def export_loads_in_transformers(model: str, device: Device, folder: str) -> None:
    policy = policy_of(model, device)
    train(policy, Optimizer(policy, ADAM), steps=1)
    full = policy.full_tensors()
    ids, _ = batch(policy.arch.vocab)
    logits = policy.logits(ids)
    if torch.distributed.get_rank() == 0:
        assert full is not None
        files = {name: (Path(model) / name).read_bytes() for name in ("config.json", "generation_config.json")}
        export_hf(Path(folder) / "hf", Export(full, files))
        with torch.no_grad():
            expected = hf_model(str(Path(folder) / "hf"))(ids).logits
        torch.testing.assert_close(logits[ids > 0], expected[ids > 0], rtol=0, atol=TOLERANCE)


def resumed_training_is_bit_identical(model: str, device: Device, folder: str) -> None:
    """Compares four uninterrupted steps with two steps, a checkpoint, a new model and optimizer, and two more steps."""
    root = Path(folder) / "checkpoints"
    straight = role_of(model, device)
    train_role(straight, steps=4)
    first = role_of(model, device)
    train_role(first, steps=2)
    device.seed(5 + torch.distributed.get_rank())
    checkpoints.save(checkpoint_path(root, 2), [first], {"term": 3})
    drawn = torch.rand(3)
    device.seed(0)
    found = checkpoint.newest(root)
    assert found is not None and (found.iteration, found.facts) == (2, {"term": 3})
    second = role_of(model, device)
    train_role(second, steps=1)  # leaves moments that loading must replace
    fractions = list[float]()
    checkpoint.load(found, [second], lambda role: fractions.append)
    assert len(fractions) > 1 and fractions == sorted(set(fractions)) and fractions[-1] == 1
    assert torch.equal(torch.rand(3), drawn)
    train_role(second, steps=2)
    trained = [role.model.state_dict().values() for role in (straight, second)]
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
    forked = role_of(model, device, replace(ADAM, beta1=0.7, beta2=0.8, eps=1e-6, weight_decay=0.3))
    checkpoint.load(found, [forked])
    assert forked.optimizer is not None
    settings = [(group["betas"], group["eps"], group["weight_decay"]) for group in forked.optimizer._groups]
    assert {(betas, eps) for betas, eps, _ in settings} == {((0.7, 0.8), 1e-6)}
    assert {decay for _, _, decay in settings} == {0.0, 0.3}, "what a fork is configured with, not what it was saved with"


def files_and_failures(tied: str, untied: str, folder: str) -> None:
    device = start("1")
    old_and_damaged_checkpoints(tied, device, folder)
    not_finite_gradients_change_nothing(untied, device)
    weights_that_are_not_finite_end_the_run(untied, device)
    sharded_files_load_like_one(untied, device, folder)
    wrong_weights_are_named(untied, device, folder)


def old_and_damaged_checkpoints(model: str, device: Device, folder: str) -> None:
    role = role_of(model, device)
    root = Path(folder) / "checkpoints"
    for iteration in (1, 2, 10):
        checkpoints.save(checkpoint_path(root, iteration), [role], {}, keep=2)
    assert [found.iteration for found in checkpoint.find(root)] == [2, 10]
    state = root / "iteration-000010" / "state-0.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    found = checkpoint.newest(root)
    assert found is not None and found.iteration == 2
    cut_short = root / ".iteration-000012.1234abcd.new"
    cut_short.mkdir()  # the remains of a crash during a save
    checkpoints.save(checkpoint_path(root, 11), [role], {})
    assert not cut_short.exists()
    found = checkpoint.newest(root)
    assert found is not None and found.iteration == 11


def not_finite_gradients_change_nothing(model: str, device: Device) -> None:
    policy = policy_of(model, device)
    optimizer = Optimizer(policy, ADAM)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    ids, targets = batch(policy.arch.vocab)
    (policy.logprobs(ids, targets).sum() * torch.inf).backward()
    optimizer.set_lr(1.0)
    with pytest.raises(RunFailedError, match="finite"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in policy.state_dict().items())


def weights_that_are_not_finite_end_the_run(model: str, device: Device) -> None:
    policy = policy_of(model, device)
    optimizer = Optimizer(policy, ADAM)
    ids, targets = batch(policy.arch.vocab)
    policy.logprobs(ids, targets).sum().backward()
    optimizer.set_lr(1e30)
    with pytest.raises(RunFailedError) as error:
        optimizer.step()
    assert "weights" in error.value.found and "1e+30" in error.value.found


def sharded_files_load_like_one(model: str, device: Device, folder: str) -> None:
    whole = policy_of(model, device, trainable=False)
    sharded = Path(folder) / "sharded"
    hf_model(model).save_pretrained(sharded, max_shard_size="10KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    parts, fractions = policy_of(str(sharded), device, trainable=False), list[float]()
    parts.load_hf(sharded, fractions.append)
    assert len(fractions) > 1 and fractions[0] > 0 and fractions == sorted(set(fractions)) and fractions[-1] == 1
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), parts.state_dict().values(), strict=True))


def wrong_weights_are_named(model: str, device: Device, folder: str) -> None:
    tensors = load_file(Path(model) / "model.safetensors")
    broken = Path(folder) / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
    for change, named in (({"model.norm.weight": torch.ones(3)}, r"\(3,\)"), ({"model.norm.weight": None}, "model.norm.weight")):
        changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        save_file(changed, broken / "model.safetensors")
        with pytest.raises(ConfigError, match=named):
            policy_of(str(broken), device, trainable=False)
