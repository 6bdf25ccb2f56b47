"""The section `teacher`: the model that provides the log-probabilities for on-policy distillation.

Invariant: the teacher's address and protocol do not affect the trained weights; only the choice of its model does.
"""

from typing import Literal

from pydantic import Field, field_validator

from polyreme.config.section import Operational, Section
from polyreme.config.security import EndpointSecurity


class TeacherConfig(Section):
    """A model with the policy's vocabulary, on any server with OpenAI-compatible completions. It returns the log-probability of
    each sampled token; `algorithm.teacher_coef` is the weight of the distillation."""

    url: Operational[str | list[str]] = Field(
        description="URL of its API, such as http://host:8000/v1, or several URLs that share the load."
    )
    model: str | None = Field(None, description="Name of the model on the server. null: the server's only model.")
    protocol: Operational[Literal["prompt_logprobs", "echo"]] = Field(
        "prompt_logprobs", description="How log-probabilities are requested: vLLM's prompt_logprobs, or echo with logprobs."
    )
    concurrency: Operational[int] = Field(16, ge=1, description="Maximum number of open requests, one sample each.")
    timeout: Operational[float] = Field(120.0, gt=0, description="Maximum seconds per request.")
    tries: Operational[int] = Field(
        4, ge=1, description="Requests per sample before the group's attempt fails, while other requests succeed."
    )
    outage_timeout: Operational[float] = Field(300.0, gt=0, description="Seconds without any answer after which the run fails.")
    security: Operational[EndpointSecurity | None] = Field(
        None, description="TLS and token of https URLs. null: the system's CA certificates and no token."
    )

    @field_validator("url")
    @classmethod
    def _places(cls, url: str | list[str]) -> str | list[str]:
        urls = [url] if isinstance(url, str) else url
        if not urls or not all(each.startswith(("http://", "https://")) for each in urls):
            raise ValueError("expected URLs like http://host:8000/v1")
        return url

    @property
    def urls(self) -> list[str]:
        """The URLs without trailing slashes."""
        return [each.rstrip("/") for each in ([self.url] if isinstance(self.url, str) else self.url)]
