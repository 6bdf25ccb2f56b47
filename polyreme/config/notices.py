"""The section `notices`: the receivers that are notified when a run ends, raises an alarm or has a new best evaluation.

Invariant: this section contains no credentials; a token is in the environment. A notice never affects the training.
"""

from typing import Annotated, Literal

from pydantic import Field

from polyreme.config.section import Section

Event = Literal["done", "stopped", "failed", "alarm", "best"]
EVENTS: tuple[Event, ...] = ("done", "stopped", "failed", "alarm", "best")
_KIND = "How the notice is sent."
_EVENTS = "Events to report: the three ends of a run, an alarm, and an evaluation that is better than all before it."


class ReceiverSection(Section):
    """The common fields of all receivers."""

    kind: str
    events: list[Event] = Field(list(EVENTS), min_length=1, description=_EVENTS)
    timeout: float = Field(10.0, gt=0, le=300, description="Maximum seconds of one attempt.")
    attempts: int = Field(4, ge=1, le=20, description="Attempts at a notice, with growing pauses between them.")


class WebhookConfig(ReceiverSection):
    """An HTTP endpoint, which gets each notice as a JSON object in a POST request."""

    kind: Literal["webhook"] = Field("webhook", description=_KIND)
    url: str = Field(
        pattern=r"^https?://[^/@\s]+(/\S*)?$", description="Address. A notice is delivered when the reply's status is 2xx."
    )
    token_env: str | None = Field(None, description="Environment variable with a bearer token to send.")


class CommandConfig(ReceiverSection):
    """A program that is started for each notice, with the notice's JSON object in the environment variable POLYREME_NOTICE."""

    kind: Literal["command"] = Field("command", description=_KIND)
    command: list[str] = Field(min_length=1, description="Program and arguments. No shell interprets them.")


ReceiverConfig = Annotated[WebhookConfig | CommandConfig, Field(discriminator="kind")]
