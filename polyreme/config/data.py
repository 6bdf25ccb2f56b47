"""The section `data`: data files, and how a row becomes a prompt.

Invariant: only this section names paths and columns; no reader has other defaults.
"""

import datetime
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from polyreme.config.named_input import HELD_OUT, TRAINING, split_name
from polyreme.config.section import Operational, Section

Fraction = Annotated[float, Field(ge=0, le=1)]


class DataSource(Section):
    """A part of the data: a file, several files, or a directory."""

    path: Annotated[Path, TRAINING] = Field(
        description="JSON lines, JSON, CSV, Parquet, Arrow or Megatron (.idx) file, by its suffix; a directory of such files or"
        " of a saved Hugging Face data set; a file name with `*`; or the name of a data set: owner/name, owner/name@revision."
    )
    config: str | None = Field(None, description="For a name: which of its configurations (subsets). null: its default one.")
    split: str | tuple[Fraction, Fraction] | None = Field(
        None,
        description="Part of the rows, by a digest of each row's content: [0, 0.9] and [0.9, 1] share no row. null: all rows."
        " For a name also one of its splits, such as test. A part is one of the split train; null: train, for held-out data test"
        " or validation.",
    )
    split_by: str | None = Field(
        None, description="Column whose content decides to which part a row belongs, such as the prompt. null: the whole row."
    )
    rename: dict[str, str] = Field({}, description="Columns to add from others of the row: new name to old name or dotted path.")
    add: dict[str, object] = Field({}, description="Columns to add to every row, with their value.")

    @field_validator("add")
    @classmethod
    def _added_values_are_json(cls, value: dict[str, object]) -> dict[str, object]:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"`add` has texts, numbers, lists and mappings, as JSON has them ({error})") from None
        return value

    @model_validator(mode="after")
    def _split_has_rows(self) -> "DataSource":
        if self.part is not None and self.part[0] >= self.part[1]:
            raise ValueError("`split` is [from, to] with from below to")
        if self.split_by is not None and self.part is None:
            raise ValueError("`split_by` needs `split: [from, to]`")
        if (self.config or isinstance(self.split, str)) and split_name(self.path) is None:
            raise ValueError(
                f"`config` and the name of a `split` belong to a name like owner/name, and {self.path} is a local path"
            )
        return self

    @property
    def part(self) -> tuple[float, float] | None:
        """The part of the rows by their digest; None: all."""
        return None if isinstance(self.split, str) else self.split


class TaskSource(DataSource):
    """A part of the data whose rows are tasks of a run."""

    tools: tuple[str, ...] | None = Field(
        None,
        description="Names of the tools that the policy may call for these rows, of those in environment.tools. []: none. null:"
        " all.",
    )


class WeightedSource(TaskSource):
    weight: float | None = Field(
        None,
        gt=0,
        description="Share of the prompts in a pass, relative to the other weights. null for all sources: each row occurs once"
        " per pass.",
    )


Sources = Path | tuple[Path | DataSource, ...]
"""The type of `data.train` and `data.eval`."""

_FILES = "Data: a path or a name (owner/name), or a list of paths, names and sources."


class TextConfig(Section):
    """Data files, and how a prompt becomes text."""

    train: Annotated[Path | tuple[Path | DataSource, ...], TRAINING] = Field(
        description=f"{_FILES} One row is one line or element."
    )
    eval: Operational[Annotated[Path | tuple[Path | DataSource, ...] | None, HELD_OUT]] = Field(
        None, description="Held-out data, in the same form. null: no evaluation."
    )
    split: str | None = Field(None, description="Split of `train` when that is one name. null: train.")
    config: str | None = Field(None, description="Configuration (subset) of `train` and `eval` when these are names.")
    prompt_key: str = Field("prompt", description="Column with the prompt: a string, or a list of chat messages.")
    template: Literal["chat", "none"] = Field(
        "chat", description="chat: the tokenizer's chat template. none: the tokenizer's BOS token followed by the unchanged text."
    )
    system: str | None = Field(None, description="System message for prompts that have none.")
    tools_key: str | None = Field(
        "tools",
        description="Column with the tools that the chat template shows: a list, or its JSON text. Optional in each row. null:"
        " none.",
    )
    date: datetime.date | None = Field(
        None,
        description="The day that a chat template shows which writes the date (`strftime_now`). null: the day on which the run"
        " starts, also after a resume.",
    )

    @model_validator(mode="before")
    @classmethod
    def _keys_of_one_name(cls, tree: object) -> object:
        """Moves `split` and `config` to the sources that they belong to."""
        if not isinstance(tree, dict) or not (tree.get("split") or tree.get("config")):
            return tree
        tree, named = {**tree}, {key: str(tree[key]) for key in ("train", "eval") if isinstance(tree.get(key), str | Path)}
        named = {key: path for key, path in named.items() if split_name(path) is not None}
        config, split = tree.pop("config", None), tree.pop("split", None)
        if (split is not None and "train" not in named) or not named:
            raise ValueError("`split` and `config` belong to a name like owner/name in `train`; a list has them in its sources")
        for key, path in named.items():
            tree[key] = [{"path": path, "config": config, "split": split if key == "train" else None}]
        return tree

    @model_validator(mode="after")
    def _has_sources(self) -> "TextConfig":
        if () in (self.train, self.eval):
            raise ValueError("a list of data sources has at least one")
        return self

    @property
    def given(self) -> "tuple[Sources, ...]":
        """The training data, then the held-out data if there is any."""
        return (self.train,) if self.eval is None else (self.train, self.eval)


class DataConfig(TextConfig):
    """Prompts for rollouts."""

    train: Annotated[Path | tuple[Path | WeightedSource, ...], TRAINING] = Field(description=f"{_FILES} One row is one prompt.")
    eval: Operational[Annotated[Path | tuple[Path | TaskSource, ...] | None, HELD_OUT]] = Field(
        None, description="Held-out data, in the same form. null: no evaluation."
    )
    label_key: str = Field("answer", description="Column with the reference answer. It is optional in each row.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Maximum prompt length in tokens.")
    overlong: Literal["filter", "error"] = Field("filter", description="What to do with a prompt longer than max_prompt_tokens.")
    deduplicate: bool = Field(False, description="Leave out prompts with the same text as an earlier one.")
    shuffle: bool = Field(
        True, description="Whether each pass over the prompts has a different random order. false: their order in the data."
    )
    shuffle_seed: int | None = Field(None, ge=0, description="Seed of the order. null: `seed`.")

    @model_validator(mode="after")
    def _all_have_weights(self) -> "DataConfig":
        if len({weight is None for weight in self.weights}) > 1:
            raise ValueError("either all sources of `data.train` have a `weight` or none has")
        return self

    @property
    def weights(self) -> tuple[float | None, ...]:
        """The weight of each source of `train`."""
        parts = self.train if isinstance(self.train, tuple) else (self.train,)
        return tuple(part.weight if isinstance(part, WeightedSource) else None for part in parts)
