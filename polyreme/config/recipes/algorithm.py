"""The section `algorithm`: a preset, its overrides, and the number of optimizer steps per iteration.

Invariant: after validation the section holds every primitive of the resolved recipe. The run's own configuration therefore
records what the preset meant, and a later version of Polyreme cannot change it.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from polyreme.config.data import DataSource
from polyreme.config.named_input import TRAINING
from polyreme.config.python_source import digest_of, find_source
from polyreme.config.recipes.presets import PRESETS, STANDARD_CORRECTION, resolve
from polyreme.config.recipes.recipe import Correction, Recipe, TvMask
from polyreme.config.section import Section
from polyreme.errors import ConfigError


class AlgorithmSource(Section):
    """A Python file or module that defines `advantages(batch)`, `loss(inputs)`, or both. Each replaces the recipe's function."""

    file: Path | None = Field(None, description="A Python file.")
    module: str | None = Field(None, description="An importable Python module.")
    digest: str | None = Field(
        None, description="Digest of the source when the run was configured. null: the digest of the current source."
    )

    @model_validator(mode="after")
    def _one(self) -> "AlgorithmSource":
        if (self.file is None) == (self.module is None):
            raise ValueError("`source` needs one of `file` and `module`")
        if self.digest is None:
            object.__setattr__(self, "digest", digest_of(self.path.read_bytes()))  # the model is frozen for its users
        return self

    @property
    def path(self) -> Path:
        """Path of the source on this machine. Raises ConfigError when the file does not exist."""
        path = self.file if self.module is None else find_source(self.module)
        if path is None or not path.is_file():
            raise ConfigError(f"a Python source at {path or self.module}", "none", "Fix algorithm.source, or create the file.")
        return path

    def code(self) -> str:
        """The text of the source. Raises ConfigError when it has changed since the run was configured."""
        content = self.path.read_bytes()
        if digest_of(content) != self.digest:
            raise ConfigError(
                f"{self.path} with the configured digest {self.digest}",
                f"digest {digest_of(content)}",
                "Restore the file, or start a new run with the changed file.",
            )
        return content.decode()


class PtxConfig(Section):
    """Supervised rows mixed into every optimizer step of the policy (PPO-ptx)."""

    data: Annotated[Path | tuple[Path | DataSource, ...], TRAINING] = Field(
        description="As data.train: rows with the prompt and a `response` column, as of trainer.sft."
    )
    coef: float = Field(gt=0, description="Weight of the rows' cross entropy, the mean over their response tokens.")
    batch_size: int = Field(ge=1, description="Rows per optimizer step.")


class AlgorithmConfig(Recipe):
    filled_by: ClassVar[str] = "preset"

    preset: str = Field("grpo", description="Name of the recipe that the other keys override.", examples=list(PRESETS))
    correction: Literal["auto"] | tuple[Correction, ...] = Field(  # type: ignore[assignment]
        "auto",
        description="Off-policy corrections. auto: truncated token weights when max_staleness > 0 or"
        " weights are bfloat16, unless the loss already measures ratios against the sampling policy.",
    )
    source: AlgorithmSource | None = Field(None, description="Source with user-defined functions. null: the recipe's functions.")
    ptx: PtxConfig | None = Field(None, description="Supervised rows mixed into every step of the policy. null: none.")
    minibatches: int = Field(1, ge=1, description="Optimizer steps per pass over an iteration's samples.")
    epochs: int = Field(1, ge=1, description="Passes over an iteration's samples.")

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, tree: object) -> object:
        if not isinstance(tree, dict):
            return tree
        own = {key: value for key, value in tree.items() if key not in Recipe.model_fields or key == "correction"}
        overrides = {key: value for key, value in tree.items() if key not in own}
        recipe = resolve(str(own.get("preset", "grpo")), overrides)
        return {**recipe.model_dump(exclude={"correction"}), **own}

    @property
    def has_critic(self) -> bool:
        """Whether the advantage estimator needs a critic."""
        return self.advantage.needs_critic

    def recipe(self, *, differs: bool) -> Recipe:
        """The recipe, with `correction: auto` resolved.

        Args:
            differs: whether the sampling policy may differ from the trained one (staleness, or a dtype that engine and learner
                round differently). Decides what `correction: auto` means.
        """
        fields = {name: getattr(self, name) for name in Recipe.model_fields}
        if self.correction == "auto":
            anchored = self.anchor == "behaviour" or isinstance(self.loss, TvMask)
            fields["correction"] = STANDARD_CORRECTION if differs and not anchored else ()
        return Recipe.model_construct(**fields)
