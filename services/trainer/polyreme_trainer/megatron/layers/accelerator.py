"""The models on cuda and npu: megatron-core's own layer spec with torch's norms, our gated activations and a fused kernel for
attention over packed sequences.

Invariant: the two specs differ only in the attention kernel; torch and torch_npu dispatch all other calls to their own kernels.
"""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from polyreme_trainer.megatron.batches.packing import Packing
from polyreme_trainer.megatron.layers.activation import OPTIONS
from polyreme_trainer.megatron.layers.attention import Attention, causal_attention, in_blocks
from polyreme_trainer.megatron.layers.block import Parts
from polyreme_trainer.megatron.layers.spec import ModelSpec
from polyreme_trainer.megatron.mcore import linear_with_grad_accumulation_and_async_allreduce

BATCHED = 8192
"""From this length on, whole sequences of one length are a batch of torch's ordinary attention. On Hopper its cuDNN kernels take
two thirds of the time for packed sequences, but prepare each shape for 0.1 s: so lengths are padded to multiples of `STEP`."""
STEP = 1024
FLASH_WIDTH = 256
"""The largest head that torch's kernel takes; its width must be a multiple of 8."""
NPU_SEQUENCES = 1024
"""The largest number of packed sequences that torch_npu's kernel takes."""


def flash(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None) -> Tensor:
    """As `in_blocks`, with torch's flash attention over packed sequences where torch has a kernel."""
    length = packing.lengths[0]
    if window is None and length >= BATCHED and len({*packing.lengths, *packing.key_lengths}) == 1:
        batch = [each.unflatten(0, (-1, length)) for each in (query, key, value)]
        if missing := -length % STEP:  # at the end, where no token of the sequence attends to them
            batch = [pad(each, (0, 0, 0, 0, 0, missing)) for each in batch]
        q, k, v = (each.transpose(1, 2) for each in batch)
        return causal_attention(q, k, v, scale).transpose(1, 2)[:, :length].flatten(0, 1)
    if query.dtype == torch.float32 or query.shape[2] % 8 or query.shape[2] > FLASH_WIDTH:
        return in_blocks(query, key, value, packing, scale, window)
    from torch.nn.attention import varlen  # torch_npu's torch has it with other parameters

    earlier = -1 if window is None else window - 1  # tokens before its own to which a query attends; -1: all
    # The kernel sees that several heads share a key, but newer releases want to be told.
    grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] and _has_groups() else {}
    # The mask aligns the last query with the last key, also where there are fewer queries than keys.
    varlen_attn: Callable[..., object] = varlen.varlen_attn  # its parameters differ between releases
    output = varlen_attn(
        query,
        key,
        value,
        packing.cu_seqlens_q,
        packing.cu_seqlens_kv,
        packing.max_seqlen_q,
        packing.max_seqlen_kv,
        scale=scale,
        window_size=(earlier, 0),
        **grouped,
    )
    assert isinstance(output, Tensor)  # the log-sum-exp was not requested
    return output


@functools.cache
def _has_groups() -> bool:
    """Whether this torch's `varlen_attn` has the parameter `enable_gqa`."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def npu_fused(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None, window: int | None) -> Tensor:
    """As `in_blocks`, with torch_npu's fused attention in its packed layout TND."""
    if len(packing.lengths) > NPU_SEQUENCES:
        return in_blocks(query, key, value, packing, scale, window)
    return torch.ops.npu.npu_fusion_attention(  # `Device` has imported torch_npu
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=_later(query.device),
        scale=query.shape[2] ** -0.5 if scale is None else scale,
        pre_tockens=2**31 - 1 if window is None else window - 1,
        next_tockens=0,
        sparse_mode=3
        if window is None
        else 4,  # causal, or a band below the diagonal, which ends at the last query and the last key
        actual_seq_qlen=packing.ends,
        actual_seq_kvlen=packing.key_ends,
    )[0]


@functools.lru_cache(maxsize=1)
def _later(device: torch.device) -> Tensor:
    """The mask from which the kernel makes that of each sequence: bool [2048, 2048], True for later positions."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


class FlashAttention(Attention):
    """The core attention on cuda."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        return flash(query, key, value, packing, self.scale, self.window)


class NpuAttention(Attention):
    """The core attention on npu."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        return npu_fused(query, key, value, packing, self.scale, self.window)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: object, sum_input_grads: bool) -> Tensor:
    return linear_with_grad_accumulation_and_async_allreduce(
        x,
        weight,
        bias,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=sum_input_grads,
        sequence_parallel=False,
        tp_group=group,
    )


CUDA = ModelSpec(block=Parts(FlashAttention).block, linear=_linear, options=OPTIONS)
NPU = ModelSpec(block=Parts(NpuAttention).block, linear=_linear, options=OPTIONS)
