"""The parts of parameters that this rank's optimizer updates, with their moments and full-precision copies.

Invariant: the fragments of all data ranks together are the trained parameters, each element once.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from polyreme.errors import ConfigError
from polyreme_trainer.megatron import mcore

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of AdamW's moments in torch."""
MASTER = "master"
"""Kind of state: the full-precision copies of weights that are not float32."""


@dataclass(frozen=True)
class Fragment:
    """The elements `start:stop` of a flat parameter, which this rank's optimizer updates.

    Attributes:
        name, param: the parameter of this rank's model.
        main: the fp32 tensor that AdamW steps: a part of the parameter, or a copy.
        copied: whether it is a copy.
        adam: the optimizer that steps `main`.
    """

    name: str
    param: Tensor
    start: int
    stop: int
    main: Tensor
    copied: bool
    adam: torch.optim.Optimizer

    @property
    def gradient(self) -> Tensor:
        """The fragment's elements of the parameter's gradient: flat, in the gradient buffer's memory."""
        return self.cut(self.param.main_grad)  # type: ignore[attr-defined]

    def cut(self, tensor: Tensor) -> Tensor:
        """The fragment's elements of a tensor of the parameter's shape: flat, in the same memory."""
        return tensor.view(-1)[self.start : self.stop]

    @property
    def moments(self) -> dict[str, Tensor]:
        """AdamW's moments by name, each of the shape of `main`; empty before the first step."""
        state = self.adam.state.get(self.main, {})
        return {name: state[name] for name in MOMENTS if name in state}

    def state_tensors(self) -> dict[str, Tensor]:
        """The optimizer's tensors for this fragment, by kind of state; the model's own weights are not among them."""
        return self.moments | ({MASTER: self.main.detach()} if self.copied else {})

    @property
    def state_bytes(self) -> int:
        """The bytes of `state_tensors` after the first step."""
        return self.main.nbytes * (len(MOMENTS) + self.copied)


def find_fragments(parameters: Iterable[tuple[str, Tensor]], inner: mcore.MegatronOptimizer) -> list[Fragment]:
    """The fragments that `inner`, a megatron-core optimizer, steps on this rank, in the order of the model's `parameters`.

    Raises ConfigError if megatron-core did not choose torch's AdamW: others keep their step count where checkpoints do not look.
    """
    _check_optimizer(inner.optimizer)
    fragments, stepped = [], {id(main) for group in inner.param_groups for main in group["params"]}
    for name, param in parameters:
        if isinstance(inner, mcore.DistributedOptimizer):
            if param not in inner.model_param_group_index_map:
                continue  # other data ranks update it
            group, place = inner.model_param_group_index_map[param]
            part = inner._get_model_param_range_map(param)["param"]
            main = inner.optimizer.param_groups[group]["params"][place]
            fragments.append(Fragment(name, param, part.start, part.end, main, main.dtype != param.dtype, inner.optimizer))
        elif param.requires_grad:
            main = param if param.dtype == torch.float32 else param.main_param  # type: ignore[attr-defined]
            if id(main) in stepped:
                fragments.append(Fragment(name, param, 0, param.numel(), main, main is not param, inner.optimizer))
    return fragments


def _check_optimizer(optimizer: object) -> None:
    if optimizer is not None and not isinstance(optimizer, torch.optim.AdamW):  # None on a rank that steps nothing
        kind = type(optimizer)
        raise ConfigError(
            "torch's AdamW",
            f"{kind.__module__}.{kind.__qualname__}, which megatron-core prefers where it is installed",
            "Uninstall transformer-engine and apex from the learner's environment.",
        )
