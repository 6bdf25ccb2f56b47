"""Models that are updated from the actor, without an optimizer: its moving average, and a reference policy that is renewed.

Invariant: a follower's weights after iteration i depend only on the actor's versions up to i. They are in every checkpoint.
"""

from collections.abc import Callable, Mapping

import torch

from polyreme_trainer.megatron.huggingface.export import Export
from polyreme_trainer.megatron.huggingface.hf_mapping import expert_biases
from polyreme_trainer.megatron.models.model import DTYPES, ShardedModel
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.training.roles import Role


class Followers:
    """The followers of one actor.

    Args:
        actor: the model that the followers follow.
        make_role: creates a frozen role of the actor's shapes from a name and a dtype.
        renew_interval: iterations after which the actor's weights (adapters merged) replace the reference; 0: no such reference.
        decay: the moving average's decay; None for no moving average.
    """

    def __init__(
        self, actor: Policy, make_role: Callable[[str, str], Role[Policy]], renew_interval: int, decay: float | None
    ) -> None:
        self._actor, self._interval, self._decay = actor, renew_interval, decay
        self.reference = make_role("reference", actor.dtype) if renew_interval else None
        self.ema = make_role("ema", "float32") if decay is not None else None

    @property
    def roles(self) -> list[Role[Policy]]:
        """The existing followers."""
        return [role for role in (self.reference, self.ema) if role is not None]

    def begin(self) -> None:
        """Copies the actor's weights into every follower, before the first iteration."""
        for role in self.roles:
            self._copy_actor(role)

    def follow(self, iteration: int) -> dict[str, float]:
        """Updates the followers after `iteration`. Returns metrics: the version of the reference that the iteration used."""
        metrics: dict[str, float] = {}
        if self.ema is not None and self._decay is not None:
            move_average(self.ema.model, self._actor, self._decay)
        if self.reference is not None:
            metrics["reference/version"] = (iteration - 1) // self._interval * self._interval
            if iteration % self._interval == 0:
                self._copy_actor(self.reference)
        return metrics

    def _copy_actor(self, role: Role[Policy]) -> None:
        role.model.use(self._actor)
        role.model.load_state_dict(self._actor.weights())

    def export(self, files: Mapping[str, bytes]) -> Export | None:
        """The moving average in the actor's dtype; None without one and on tensor ranks other than the first. Collective."""
        tensors = None if self.ema is None else self.ema.model.full_tensors()
        if tensors is None:
            return None
        dtypes = dict.fromkeys(expert_biases(self._actor.arch), torch.float32)
        newest = DTYPES[self._actor.dtype][0]
        return Export({name: tensor.to(dtypes.get(name, newest)) for name, tensor in tensors.items()}, files)


@torch.no_grad()
def move_average(average: ShardedModel, actor: ShardedModel, decay: float) -> None:
    """`average = decay average + (1 - decay) actor`, in float32, so that small steps are not rounded away."""
    average.use(actor)
    newest = actor.weights()
    for name, param in average.state_dict().items():
        param.lerp_(newest[name].to(param.dtype), 1 - decay)
