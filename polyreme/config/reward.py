"""The section `reward`: the rewards of a response, and the resources of the reward service.

Invariant: each reward has exactly one source, and no two rewards have the same label.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyreme.config.named_input import MODEL
from polyreme.config.section import Operational, Section
from polyreme.config.security import EndpointSecurity, ServiceSection


class RewardSpec(Section):
    """One reward. Its source is a built-in or installed reward (`name` alone), a Python function (`file` or `module`), an HTTP
    endpoint (`url`), or a Hugging Face sequence classifier (`model`)."""

    name: str | None = Field(
        None, description="Name of a built-in or installed reward. With another source, label of the reward."
    )
    file: Path | None = Field(None, description="Python file with a reward function.")
    module: str | None = Field(None, description="Importable Python module with a reward function.")
    function: str | None = Field(None, description="Name of the function in `file` or `module`. Required when there are several.")
    url: str | list[str] | None = Field(None, description="HTTP endpoint, or several that share the load.")
    protocol: Literal["paddlenlp", "openrlhf", "native"] | None = Field(None, description="Protocol of the endpoint.")
    security: Operational[EndpointSecurity | None] = Field(
        None, description="TLS and token of an https endpoint. null: the system's CA certificates and no token."
    )
    model: Annotated[Path | None, MODEL] = Field(
        None, description="Hugging Face directory or name of a sequence classifier whose output is the score."
    )
    weight: float = Field(1.0, description="Weight of the reward's value in the score.")
    options: dict[str, object] = Field({}, description="Arguments of the reward.")

    @model_validator(mode="after")
    def _one_source(self) -> "RewardSpec":
        sources = [key for key in ("file", "module", "url", "model") if getattr(self, key)]
        if len(sources) > 1 or not (sources or self.name):
            raise ValueError("a reward needs exactly one of `name` (built-in or installed), `file`, `module`, `model` and `url`")
        if (self.url is None) != (self.protocol is None):
            raise ValueError("`url` and `protocol` require each other")
        if self.function is not None and not (self.file or self.module):
            raise ValueError("`function` names a function in `file` or `module`")
        if self.security is not None and not (self.urls and all(url.startswith("https://") for url in self.urls)):
            raise ValueError("`security` needs an https:// `url`: any other connection would expose the token")
        return self

    @property
    def urls(self) -> list[str]:
        """The endpoints; empty for a reward without endpoints."""
        return [self.url] if isinstance(self.url, str) else self.url or []

    @property
    def label(self) -> str:
        """Name of the reward in the parts of a score."""
        path = self.file.stem if self.file else self.model.name if self.model else None
        return self.name or path or self.module or ",".join(self.urls)


class RewardConfig(ServiceSection):
    rewards: list[RewardSpec] = Field(min_length=1, description="Rewards. A score is the weighted sum of their values.")
    choose_by: str | None = Field(
        None, description="Column with the name of a row's reward, or a list of names. null: all rewards score every row."
    )
    choices: dict[str, str] = Field(
        {},
        description="Maps values of the column `choose_by` to names of rewards. A value that is not listed is itself the name of"
        " a reward.",
    )
    item_timeout: float = Field(10.0, gt=0, description="Maximum seconds per item, without its time in the queue.")
    workers: Operational[int] = Field(1, ge=1, description="Worker processes for rewards that run inside the reward service.")
    queue: Operational[int] = Field(
        16384, ge=1, description="Maximum number of items in a reward server. It refuses further items."
    )
    special_tokens: list[str] = Field([], description="Special tokens to remove from the texts of foreign HTTP protocols.")
    attempts: int = Field(3, ge=1, description="Score requests per attempt at a group.")
    start_timeout: Operational[float] = Field(
        60.0, gt=0, description="Maximum seconds for loading the rewards, and for the first server's registration."
    )

    @model_validator(mode="after")
    def _distinct(self) -> "RewardConfig":
        labels = [spec.label for spec in self.rewards]
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"two rewards are called {', '.join(sorted(twice))}; set a different `name`")
        if self.choices and self.choose_by is None:
            raise ValueError("`choices` needs `choose_by`, the column whose values it lists")
        if unknown := set(self.choices.values()) - set(labels):
            raise ValueError(f"`choices` names {', '.join(sorted(unknown))}, which is none of the rewards {', '.join(labels)}")
        return self
