"""The section `data`: prompts, and how a row of a file becomes one."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from polyreme.config.section import Operational, Section


class TextConfig(Section):
    """Where the rows are, and how a prompt becomes text. Shared by all kinds of data."""

    train: Path = Field(description="JSON lines: one row each.")
    eval: Operational[Path | None] = Field(None, description="JSON lines of held-out rows. Without it, the run is not evaluated.")
    prompt_key: str = Field("prompt", description="Column with the prompt: a string, or a list of chat messages.")
    template: Literal["chat", "none"] = Field(
        "chat", description="chat: the tokenizer's chat template. none: the text as it is, after the tokenizer's BOS token."
    )
    system: str | None = Field(None, description="System message before every prompt that has none.")


class DataConfig(TextConfig):
    """Prompts."""

    label_key: str = Field("answer", description="Column with the reference answer. A row may lack it.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longest prompt, in tokens.")
    overlong: Literal["filter", "error"] = Field("filter", description="What to do with a prompt beyond max_prompt_tokens.")
