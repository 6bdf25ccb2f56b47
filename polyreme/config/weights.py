"""The section `weights`: the transfer of policy versions to the replicas.

Invariant: no key changes the bytes that a replica serves.
"""

from pydantic import Field

from polyreme.config.section import Operational, Section


class WeightsConfig(Section):
    anchor_interval: Operational[int] = Field(
        20,
        ge=1,
        description="Number of versions after which a replica without the trainer's shared memory receives a whole version; in between it receives only what has changed. 1: always the whole version.",
    )
    canary_limit: Operational[float | None] = Field(
        None,
        gt=0,
        description="Largest mean difference, in nats, between a replica's and the learner's log-probabilities of the canary, above which the replica serves nothing. null: 0.001 in float32, 0.1 in bfloat16.",
    )
    relay_roots: Operational[int] = Field(
        1,
        ge=1,
        description="Number of replicas without the trainer's shared memory that receive the same version from the trainer. The others fetch it from a replica that has verified it, or from the trainer if that fails.",
    )
