"""The section `model`: the policy to train.

Invariant: one directory and one dtype apply to trainer and replicas.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from polyreme.config.section import Section


class ModelConfig(Section):
    path: Path = Field(description="Hugging Face directory with config.json, tokenizer files and safetensors.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Data type of weights and computation, in trainer and replicas."
    )
