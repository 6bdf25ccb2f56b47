"""The sections `model` and `weights`: the policy to train, and the transfer of its versions to the replicas.

Invariant: one directory and one dtype apply to trainer and replicas. No key of `weights` changes the bytes that a replica serves.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from polyreme.config.named_input import MODEL
from polyreme.config.section import Operational, Section


class ModelConfig(Section):
    path: Annotated[Path, MODEL] = Field(
        description="Hugging Face directory with config.json, tokenizer files and safetensors, or the name of a model:"
        " owner/name, owner/name@revision."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Data type of weights and computation, in trainer and replicas."
    )


class WeightsConfig(Section):
    anchor_interval: Operational[int] = Field(
        20,
        ge=1,
        description="Number of versions after which a replica without the trainer's shared memory receives a whole version; in"
        " between it receives only what has changed. 1: always the whole version.",
    )
    canary_limit: Operational[float | None] = Field(
        None,
        gt=0,
        description="Largest mean difference, in nats, between a replica's and the learner's log-probabilities of the canary,"
        " above which the replica serves nothing. null: 0.001 in float32, 0.1 in bfloat16.",
    )
    relay_roots: Operational[int] = Field(
        1,
        ge=1,
        description="Number of replicas without the trainer's shared memory that receive the same version from the trainer. The"
        " others fetch it from a replica that has verified it, or from the trainer if that fails.",
    )
