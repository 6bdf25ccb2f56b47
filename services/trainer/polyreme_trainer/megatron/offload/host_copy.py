"""Copies of tensors in host memory, inside plain containers.

Invariant: a copy shares no memory with its source. It has memory only for its elements, even if the source is part of a buffer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def tensors_in(content: object) -> Iterator[Tensor]:
    """The tensors in mappings, tuples and lists of any depth."""
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, Mapping | tuple | list):
        for value in content.values() if isinstance(content, Mapping) else content:
            yield from tensors_in(value)


def copied_to_host(content: Any) -> Any:
    """New containers of the same structure with copies of the tensors. Other values are the same objects.

    Copies of an accelerator's tensors are in page-locked memory, and complete only after the device has been synchronized.
    """
    if isinstance(content, Tensor):
        onto = torch.empty(content.shape, dtype=content.dtype, pin_memory=content.device.type != "cpu")
        return onto.copy_(content.detach(), non_blocking=True)
    if isinstance(content, Mapping):
        return {key: copied_to_host(value) for key, value in content.items()}
    if isinstance(content, tuple | list):
        return type(content)(copied_to_host(value) for value in content)
    return content
