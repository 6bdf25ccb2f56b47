"""The section `data`: prompt files, and how a row becomes a prompt.

Invariant: paths and columns are named here only; no reader has a default of its own.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from polyreme.config.section import Operational, Section


class TextConfig(Section):
    """Data files, and how a prompt becomes text."""

    train: Path = Field(description="JSON lines file with one row per line.")
    eval: Operational[Path | None] = Field(None, description="JSON lines file with held-out rows. null: no evaluation.")
    prompt_key: str = Field("prompt", description="Column with the prompt: a string, or a list of chat messages.")
    template: Literal["chat", "none"] = Field(
        "chat", description="chat: the tokenizer's chat template. none: the tokenizer's BOS token followed by the unchanged text."
    )
    system: str | None = Field(None, description="System message for prompts that have none.")


class DataConfig(TextConfig):
    """Prompts for rollouts."""

    label_key: str = Field("answer", description="Column with the reference answer. It is optional in each row.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Maximum prompt length in tokens.")
    overlong: Literal["filter", "error"] = Field("filter", description="What to do with a prompt longer than max_prompt_tokens.")
