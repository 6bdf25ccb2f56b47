"""Runs in the ranks of test_convert_megatron: megatron-core itself reads the converted checkpoints and writes others."""

import json
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from polyreme_trainer.megatron.accelerator import CUDA
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.families import load_architecture
from polyreme_trainer.megatron.policy import Policy
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
        file = Path(converted) / model.name / "iter_0000001" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        state: dict[str, Any] = torch.load(file, weights_only=False)["model"]
        for parameter in policy.module.parameters():
            parameter.zero_()
        found = policy.module.load_state_dict(state, strict=False)
        assert not found.unexpected_keys
        assert all("_extra_state" in name for name in found.missing_keys)
        assert all(torch.equal(value, expected[name]) for name, value in policy.state_dict().items())


def load_torch_dist(policy: Policy, folder: Path, device: Device) -> None:
    """Loads the checkpoint into this rank's module, in any layout. A name that only one side has is an error."""
    for parameter in policy.module.parameters():
        parameter.zero_()
    with device.megatron():
        state = dist_checkpointing.load(
            policy.module.sharded_state_dict(), str(folder), strict=dist_checkpointing.validation.StrictHandling.RAISE_ALL
        )
    assert state["checkpoint_version"] == 3.0 and state["args"].num_layers == policy.arch.layers
    policy.module.load_state_dict({name: state[name] for name in policy.module.state_dict() if name in state})
