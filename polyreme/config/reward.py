"""The section `reward`: what a response is worth, and how the reward service computes it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from polyreme.config.section import Operational, Section
from polyreme.config.security import EndpointSecurity, SecurityConfig


class RewardSpec(Section):
    """One reward. Its source is built in or installed (`name` alone), a Python function (`file` or `module`), an HTTP endpoint
    (`url`), or a Hugging Face sequence classifier (`model`)."""

    name: str | None = Field(None, description="Name of a built-in or installed reward; with another source, name of its part.")
    file: Path | None = Field(None, description="A Python file with a reward function.")
    module: str | None = Field(None, description="An importable Python module with a reward function.")
    function: str | None = Field(None, description="The function in `file` or `module`, when there are several.")
    url: str | list[str] | None = Field(None, description="An HTTP endpoint, or several that share the load.")
    protocol: Literal["paddlenlp", "openrlhf", "native"] | None = Field(None, description="Protocol of the endpoint.")
    security: Operational[EndpointSecurity | None] = Field(
        None, description="TLS and token of an https endpoint. Without it, the system's CA certificates and no token."
    )
    model: Path | None = Field(None, description="Hugging Face directory of a sequence classifier: its output is the score.")
    weight: float = Field(1.0, description="Factor of the reward's value in the score.")
    options: dict[str, Any] = Field({}, description="Arguments of the reward.")

    @model_validator(mode="after")
    def _one_source(self) -> "RewardSpec":
        sources = [key for key in ("file", "module", "url", "model") if getattr(self, key)]
        if len(sources) > 1 or not (sources or self.name):
            raise ValueError("a reward needs one of `name` (built in or installed), `file`, `module`, `model` or `url`")
        if (self.url is None) != (self.protocol is None):
            raise ValueError("`url` and `protocol` go together")
        if self.function is not None and not (self.file or self.module):
            raise ValueError("`function` names a function in `file` or `module`")
        if self.security is not None and not (self.urls and all(url.startswith("https://") for url in self.urls)):
            raise ValueError("`security` needs a `url` with https://: a token would be readable on any other wire")
        return self

    @property
    def urls(self) -> list[str]:
        """The endpoints; empty for other rewards."""
        return [self.url] if isinstance(self.url, str) else self.url or []

    @property
    def label(self) -> str:
        """Name of the reward's part of a score."""
        path = self.file.stem if self.file else self.model.name if self.model else None
        return self.name or path or self.module or ",".join(self.urls)


class RewardConfig(Section):
    rewards: list[RewardSpec] = Field(min_length=1, description="The rewards. A score is the sum of their weighted values.")
    choose_by: str | None = Field(
        None, description="Column that names a row's rewards, one or a list. Without it, all rewards score every row."
    )
    item_timeout: float = Field(10.0, gt=0, description="Seconds for one item, time in the queue excluded.")
    workers: Operational[int] = Field(1, ge=1, description="Worker processes for rewards that run in the reward service.")
    worker_memory_mib: Operational[int] = Field(4096, ge=64, description="Data memory of each worker process.")
    worker_environment: Operational[list[str]] = Field(
        [],
        description="Variables that worker processes get beside the usual ones, such as an API key that a Python reward reads.",
    )
    queue: Operational[int] = Field(
        16384, ge=1, description="Items that a reward server accepts at once. It refuses further ones."
    )
    special_tokens: list[str] = Field(
        [], description="Tokens removed from prompts, responses and labels of foreign HTTP wires, which carry them as text."
    )
    security: Operational[SecurityConfig | None] = Field(
        None, description="TLS and tokens of both ports. Without it, plain ports, for loopback only."
    )
    attempts: int = Field(3, ge=1, description="Requests for a group's scores before the attempt at the group fails.")
    start_timeout: Operational[float] = Field(
        60.0, gt=0, description="Seconds until rewards are loaded, and until a server must be registered."
    )

    @model_validator(mode="after")
    def _distinct(self) -> "RewardConfig":
        labels = [spec.label for spec in self.rewards]
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"two rewards are called {', '.join(sorted(twice))}; give one another `name`")
        return self
