"""The section `trackers`: experiment trackers that get a run's metrics in addition to metrics.jsonl and TensorBoard.

Invariant: this section contains no credentials. Each tracker's package reads them from the environment or from its login.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from polyreme.config.section import Section

KIND = "The tracker."
PROJECT = "Project of the run."


class TrackerSection(Section):
    """The common fields of all trackers.

    Attributes:
        package: name of the required package for pip; of a plugin, which is any package, none.
        module: name of the package's module, likewise.
    """

    package: ClassVar[str] = ""
    module: ClassVar[str] = ""
    kind: str
    project: str = Field("polyreme", min_length=1, description=PROJECT)


class WandbConfig(TrackerSection):
    """Weights & Biases. The key comes from WANDB_API_KEY or `wandb login`."""

    package: ClassVar[str] = "wandb"
    module: ClassVar[str] = "wandb"
    kind: Literal["wandb"] = Field("wandb", description=KIND)
    entity: str | None = Field(None, description="User or team. null: the key's default.")
    mode: Literal["online", "offline"] = Field("online", description="offline: files below the run directory, for `wandb sync`.")


class SwanlabConfig(TrackerSection):
    """SwanLab. The key comes from SWANLAB_API_KEY or `swanlab login`."""

    package: ClassVar[str] = "swanlab"
    module: ClassVar[str] = "swanlab"
    kind: Literal["swanlab"] = Field("swanlab", description=KIND)
    workspace: str | None = Field(None, description="User or organisation. null: the key's default.")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: files below the run directory, for `swanlab sync`."
    )


class MlflowConfig(TrackerSection):
    """MLflow. A server's credentials come from its own variables, such as MLFLOW_TRACKING_TOKEN."""

    package: ClassVar[str] = "mlflow-skinny"
    module: ClassVar[str] = "mlflow"
    kind: Literal["mlflow"] = Field("mlflow", description=KIND)
    uri: str | None = Field(None, description="Tracking server. null: a file store below the run directory.")


class TrackioConfig(TrackerSection):
    """Trackio. A Space's token comes from HF_TOKEN."""

    package: ClassVar[str] = "trackio"
    module: ClassVar[str] = "trackio"
    kind: Literal["trackio"] = Field("trackio", description=KIND)
    space: str | None = Field(None, description="Hugging Face Space. null: a local database.")
    directory: Path | None = Field(None, description="Directory of the local database. null: below the run directory.")


class PluginConfig(TrackerSection):
    """A tracker of another installed package: an entry point of the group `polyreme.trackers`."""

    kind: Literal["plugin"] = Field("plugin", description=KIND)
    name: str = Field(min_length=1, description="Name of the entry point.")
    options: dict[str, object] = Field(default_factory=dict, description="Options that only this tracker reads.")


TrackerConfig = Annotated[WandbConfig | SwanlabConfig | MlflowConfig | TrackioConfig | PluginConfig, Field(discriminator="kind")]
