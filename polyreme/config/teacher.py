"""The section `teacher`: whose log-probabilities an on-policy distillation follows.

Invariant: where the teacher is, and how it is asked, does not decide the trained weights; which model it is does.
"""

from typing import Literal

from pydantic import Field, field_validator

from polyreme.config.section import Operational, Section
from polyreme.config.security import EndpointSecurity


class TeacherConfig(Section):
    """A model with the policy's vocabulary, on any server with OpenAI's completions. It is asked for the log-probability of each sampled
    token; `algorithm.teacher_coef` is the weight of what it says."""

    url: Operational[str | list[str]] = Field(
        description="Where its API is, such as http://host:8000/v1, or several places that share the load."
    )
    model: str | None = Field(None, description="Its name there. Without it, the only model that the server has.")
    protocol: Operational[Literal["prompt_logprobs", "echo"]] = Field(
        "prompt_logprobs", description="How log-probabilities are asked for: vLLM's prompt_logprobs, or echo with logprobs."
    )
    concurrency: Operational[int] = Field(16, ge=1, description="Open requests, each for one sample.")
    timeout: Operational[float] = Field(120.0, gt=0, description="Seconds for one request.")
    tries: Operational[int] = Field(
        4, ge=1, description="Failed requests for one sample, while others are answered, before the group's attempt fails."
    )
    outage_timeout: Operational[float] = Field(
        300.0, gt=0, description="Seconds without any answer, at the start or later, after which the run fails."
    )
    security: Operational[EndpointSecurity | None] = Field(
        None, description="TLS and token of https places. Without it, the system's CA certificates and no token."
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
        """The places, without a slash at the end."""
        return [each.rstrip("/") for each in ([self.url] if isinstance(self.url, str) else self.url)]
