"""The imports of megatron-core.

Invariant: no other module imports megatron, so one place controls the cost and the output of the import: no warnings about
missing CUDA packages, no compiler where nothing is compiled, no tracker.
"""
# ruff: noqa: F401 - the other modules import these names from here

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from polyreme_trainer.megatron.mindspeed import adapt


def _uncompiled(function: Callable[..., object] | None = None, **_: object) -> Callable[..., object]:
    """Replaces torch.compile, also where it is called with options."""
    return function if function is not None else _uncompiled


@contextmanager
def _light_import() -> Iterator[None]:
    """megatron-core compiles its fused functions when it is imported, and imports wandb where that is installed. Without CUDA no
    fused function is called, and trackers run in separate processes. Without both, each rank's start takes 3 CPU seconds less.
    """
    compiler, wandb = torch.compile, sys.modules.get("wandb")
    sys.modules["wandb"] = None  # type: ignore[assignment]  # Python's own mark of a module that cannot be imported
    if not torch.cuda.is_available():
        torch.compile = _uncompiled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler
        del sys.modules["wandb"]
        if wandb is not None:
            sys.modules["wandb"] = wandb


with warnings.catch_warnings(), _light_import():
    warnings.simplefilter("ignore")
    adapt()  # on npu; the replacements must be there when megatron-core chooses its classes
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_with_interleaving,
        forward_backward_pipelining_without_interleaving,
    )
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        mappings,
        reduce_from_tensor_model_parallel_region,
    )
    from megatron.core.tensor_parallel import random as random_states
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        linear_with_grad_accumulation_and_async_allreduce,
    )
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import is_layer_window_attention

logging.getLogger("megatron").setLevel(logging.WARNING)
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning
)  # by the distributed optimizer, in each process
