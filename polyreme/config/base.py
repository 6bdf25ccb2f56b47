"""The fields that the configurations of a run and of a stage share.

Invariant: the fingerprint depends on every field that decides the trained weights, and on no other field. Fields that change them
only by rounding, such as the layout of the ranks, do not decide them.
"""

import hashlib
import json
from pathlib import Path
from typing import ClassVar, Literal

import yaml
from pydantic import Field, field_validator

from polyreme.config.named_input import NamedInput, filled
from polyreme.config.notices import ReceiverConfig
from polyreme.config.section import Operational, Section, without_operational
from polyreme.config.trackers import TrackerConfig
from polyreme.config.yaml_text import Tree

NAME = r"^[a-z0-9][a-z0-9-]*$"
"""What the name of a run looks like."""


class BaseConfig(Section):
    """The configuration of a run or a stage.

    Attributes:
        checkpoint_prefix: first part of a checkpoint's name, `PREFIX-NUMBER`.
    """

    checkpoint_prefix: ClassVar[str] = "iteration"

    name: Operational[str] = Field("run", pattern=NAME, description="Name of the run: lower-case letters, digits, hyphens.")
    output_dir: Operational[Path] = Field(Path("runs"), description="Parent directory of the run directory output_dir/name.")
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and initial weights.")
    device: Literal["cpu", "cuda", "npu"] = Field("cpu", description="Device type of learner and replicas.")
    names: Operational[list[NamedInput]] = Field(
        [], description="Written by a start: the repositories behind names of models and data, with the commit of each."
    )
    trackers: Operational[list[TrackerConfig]] = Field(
        [], description="Trackers that get the metrics in addition to metrics.jsonl and TensorBoard, at most one of each kind."
    )
    notices: Operational[list[ReceiverConfig]] = Field(
        [], description="Webhooks and commands that are notified when the run ends, raises an alarm or has a new best evaluation."
    )

    @field_validator("trackers")
    @classmethod
    def _has_no_tracker_twice(cls, trackers: list[TrackerConfig]) -> list[TrackerConfig]:
        kinds = [tracker.kind for tracker in trackers]
        if twice := {kind for kind in kinds if kinds.count(kind) > 1}:
            raise ValueError(f"trackers has {', '.join(sorted(twice))} twice; a run has one tracker of each kind")
        return trackers

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name

    def to_yaml(self) -> str:
        """The resolved configuration as YAML that `load_any` can read."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def fingerprint(self) -> str:
        """Digest (16 hexadecimal digits) of the fields that decide the trained weights. A resume requires the same digest.

        It excludes operational fields, except those of `decisive_length`.
        """
        fields = self.by_name(without_operational(self) | self.decisive_length())
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]

    def by_name(self, tree: Tree) -> Tree:
        """A tree of configuration values with `owner/name@commit` in place of repositories' paths, which differ by machine."""
        tree = {key: value for key, value in tree.items() if key != "names"}
        return dict(filled(tree, {str(each.path): str(each) for each in self.names}))

    def shown(self, path: Path) -> str:
        """A path as users know it: the name of a repository, or the last part of a local path."""
        return next((str(each) for each in self.names if each.path == path), path.name)

    def published(self, path: Path) -> tuple[str, str | None]:
        """Where others find the files of `path`: name and commit of a repository; else the path itself, without a commit."""
        return next(((each.name, each.revision) for each in self.names if each.path == path), (str(path), None))

    def decisive_length(self) -> dict[str, object]:
        """The operational fields that set the length of the training, when the learning rate depends on them."""
        return {}
