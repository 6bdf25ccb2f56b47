"""What the configurations of all runs share, whether a run trains by reinforcement learning or is a stage of its own.

Invariant: the fingerprint holds every field that decides the trained weights and no other.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field

from polyreme.config.section import Operational, Section, without_operational


class BaseConfig(Section):
    """A run's configuration.

    Attributes:
        checkpoint_prefix: names the run's checkpoints, `PREFIX-NUMBER`.
    """

    checkpoint_prefix: ClassVar[str] = "iteration"

    name: Operational[str] = Field(
        "run", pattern=r"^[a-z0-9][a-z0-9-]*$", description="Name of the run: lower-case letters, digits, hyphens."
    )
    output_dir: Operational[Path] = Field(Path("runs"), description="The run directory is output_dir/name.")
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and initial values.")
    device: Literal["cpu", "cuda", "npu"] = Field("cpu", description="Kind of device of learner and replicas.")

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name

    def to_yaml(self) -> str:
        """The resolved configuration, as YAML that reads back as the same configuration."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def fingerprint(self) -> str:
        """Digest (16 hex digits) of what decides the trained weights, for a resume that must repeat them.

        It leaves out operational fields, except those of `decisive_length`.
        """
        fields = without_operational(self) | self.decisive_length()
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def decisive_length(self) -> dict[str, Any]:
        """The run's length, where the learning rate depends on it."""
        return {}
