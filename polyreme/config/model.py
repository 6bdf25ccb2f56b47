"""The section `model`: which policy is trained."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from polyreme.config.section import Section


class ModelConfig(Section):
    path: Path = Field(description="Hugging Face directory: config.json, tokenizer files, safetensors.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number format of weights and computation, in trainer and replicas."
    )
