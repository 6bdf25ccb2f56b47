"""Runs in the ranks of test_convert_megatron: megatron-core itself reads the converted checkpoints and writes others."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core import dist_checkpointing
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import experts
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyreme.config.trainer import ParallelConfig
from polyreme_trainer.convert.layout import FILE, directory_name, entry_names
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import is_expert_bias
from polyreme_trainer.megatron.layers.accelerator import CUDA
from polyreme_trainer.megatron.mcore import initialize_rng_tracker
from polyreme_trainer.megatron.models.build import close_parallel, create_groups
from polyreme_trainer.megatron.models.policy import Policy
from support import model_checks


def save_and_load(models: str, converted: str, written: str, tensor: str) -> None:
    """Loads each model of a JSON list from its rank files and its torch_dist checkpoint in `converted`, and saves it as torch_dist in
    `written`."""
    device = model_checks.start(tensor)
    rank = torch.distributed.get_rank()
    for model in map(Path, json.loads(models)):
        policy = Policy(load_architecture(model), "float32", device, trainable=False, spec=CUDA)
        policy.load_hf(model)
        expected = {name: value.clone() for name, value in policy.state_dict().items()}
        folder = Path(written) / model.name
        if rank == 0:
            folder.mkdir()
        torch.distributed.barrier()
        with device.megatron():
            dist_checkpointing.save(policy.module.sharded_state_dict(), str(folder))
        load_torch_dist(policy, Path(converted) / f"{model.name}-dist" / "iter_0000001", device)
        assert all(torch.equal(value, expected[name]) for name, value in policy.state_dict().items())
        load_rank_files(policy, Path(converted) / model.name / "iter_0000001")


def load_as_every_rank(layouts: str, converted: str) -> None:
    """Loads the rank files of each model of a JSON object, which has a layout for each, as every rank of the layout in turn.

    No rank communicates while it loads, so torch's fake process group takes the place of the others.
    """
    for model, policy in every_rank(layouts, "float32"):
        load_rank_files(policy, Path(converted) / model.name / "iter_0000001")


def every_rank(layouts: str, dtype: str) -> Iterator[tuple[Path, Policy]]:
    """Each model of a JSON object, which has a layout for each, with its weights, on every rank of the layout in turn."""
    device = Device("cpu")
    initialize_rng_tracker(inference_rng_tracker=True)
    for model, layout in json.loads(layouts).items():
        parallel = ParallelConfig(**layout)
        for rank in range(parallel.world_size):
            torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.world_size)
            create_groups(parallel, device)
            policy = Policy(load_architecture(Path(model)), dtype, device, trainable=False, spec=CUDA)
            policy.load_hf(Path(model))
            yield Path(model), policy
            close_parallel()


def load_grouped_experts(layouts: str, converted: str) -> None:
    """megatron-core's GroupedMLP loads the files of each model as every rank in turn, and computes what the rank's single experts compute."""
    for model, policy in every_rank(layouts, "bfloat16"):
        folder = Path(converted) / model.name / "iter_0000001"
        content = torch.load(folder / directory_name(policy.rank) / FILE, weights_only=False)
        for chunk, entry in zip(policy.chunks, entry_names(policy.rank.vpp), strict=True):
            single = [layer.mlp.experts for layer in chunk.decoder.layers]
            with grouped_gemm(), policy.device.megatron():
                for layer, before in zip(chunk.decoder.layers, single, strict=True):
                    groups = ProcessGroupCollection.use_mpu_process_groups()
                    layer.mlp.experts = experts.GroupedMLP(before.num_local_experts, chunk.config, groups)
                found = chunk.load_state_dict(content[entry], strict=False)
                assert not found.unexpected_keys and all("_extra_state" in name for name in found.missing_keys)
                for layer, before in zip(chunk.decoder.layers, single, strict=True):
                    counts = torch.arange(1, before.num_local_experts + 1)
                    tokens = torch.randn(int(counts.sum()), chunk.config.hidden_size).bfloat16()
                    weights = torch.rand(len(tokens))
                    (ours, _), (theirs, _) = (each(tokens, counts, weights) for each in (before, layer.mlp.experts))
                    assert ours.any()
                    torch.testing.assert_close(theirs, ours, rtol=0.02, atol=0.02 * float(ours.abs().max()))


@contextmanager
def grouped_gemm() -> Iterator[None]:
    """Gives megatron-core the one function that it calls of the package grouped_gemm, which has kernels for CUDA only."""

    def gmm(tokens: Tensor, weights: Tensor, counts: Tensor, trans_b: bool) -> Tensor:
        assert not trans_b
        return torch.cat([part @ weight for part, weight in zip(tokens.split(counts.tolist()), weights, strict=True)])

    package, experts.gg = experts.gg, SimpleNamespace(ops=SimpleNamespace(gmm=gmm), assert_grouped_gemm_is_available=lambda: None)
    try:
        yield
    finally:
        experts.gg = package


def load_rank_files(policy: Policy, folder: Path) -> None:
    """Loads this rank's file into each of megatron-core's models of the rank, as Megatron-LM does, and compares the weights with those before."""
    content = torch.load(folder / directory_name(policy.rank) / FILE, weights_only=False)
    for chunk, entry in zip(policy.chunks, entry_names(policy.rank.vpp), strict=True):
        expected = {name: weight.clone() for name, weight in weights(chunk).items()}
        for weight in weights(chunk).values():
            weight.zero_()
        found = chunk.load_state_dict(content[entry], strict=False)
        assert not found.unexpected_keys
        assert all("_extra_state" in name for name in found.missing_keys)
        assert all(torch.equal(weight, expected[name]) for name, weight in weights(chunk).items())


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and the expert biases of a module."""
    return dict(module.named_parameters()) | {name: each for name, each in module.named_buffers() if is_expert_bias(name)}


def load_torch_dist(policy: Policy, folder: Path, device: Device) -> None:
    """Loads the checkpoint into this rank's module, in any layout. A name that only one side has is an error."""
    for weight in weights(policy.module).values():
        weight.zero_()
    with device.megatron():
        state = dist_checkpointing.load(
            policy.module.sharded_state_dict(), str(folder), strict=dist_checkpointing.validation.StrictHandling.RAISE_ALL
        )
    assert state["checkpoint_version"] == 3.0 and state["args"].num_layers == policy.arch.layers
    policy.module.load_state_dict({name: state[name] for name in policy.module.state_dict() if name in state})
