"""The section `model`: the policy to train.

Invariant: one directory and one dtype apply to trainer and replicas.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from polyreme.config.named_input import MODEL
from polyreme.config.section import Section


class ModelConfig(Section):
    path: Annotated[Path, MODEL] = Field(
        description="Hugging Face directory with config.json, tokenizer files and safetensors, or the name of a model: owner/name,"
        " owner/name@revision."
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Data type of weights and computation, in trainer and replicas."
    )
