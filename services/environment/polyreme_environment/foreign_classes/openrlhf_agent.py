"""OpenRLHF's agent instance as an environment of our contract.

It has `reset({observation, label})` -> {observation} and `step({observation_text, action_text, label, sampling_params})` ->
{rewards, scores, environment_feedback, done, sampling_params, extra_logs}, both coroutines. The service adds the chat markup.

Invariant: every key of an answer has a meaning here, or is refused by its name.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from polyreme_environment.contract import ContractError, Reply, finite

_STATES = ("states", "state_dict")
"""The names that OpenRLHF's interface has for the argument of `step`."""
_NEEDED = ("rewards", "environment_feedback", "done")
_REFUSED = {
    "sampling_params": "the run's configuration has the sampling (rollout)",
    "environment_images": "an episode has no images",
}
_KNOWN = {*_NEEDED, "scores", "extra_logs"}


def is_agent_instance(kind: Any) -> bool:
    """Whether a class has the signature of an agent instance (coroutines, of which `step` takes the states) or its base class."""
    if not inspect.iscoroutinefunction(kind.reset) or not inspect.iscoroutinefunction(getattr(kind, "step", None)):
        return False
    derived = any(base.__name__ == "AgentInstanceBase" for base in kind.__mro__)
    return derived or [*inspect.signature(kind.step).parameters][1:2] in [[name] for name in _STATES]


class InstanceEpisode:
    """An episode of an agent instance."""

    _agent_class: Any = None
    _agent_options: Mapping[str, object] = {}

    async def reset(self, row: dict[str, object]) -> str | None:
        """Begins. The row's own prompt begins the conversation, unless the agent returns another text."""
        self._agent, self._label = self._agent_class.__new__(self._agent_class), row.get("label", row.get("answer"))
        begun = self._agent.__init__(**self._agent_options)
        if inspect.iscoroutine(begun):  # OpenRLHF's earlier releases await it
            await begun
        prompt = _text_of(row)
        answer = await self._agent.reset({"observation": prompt, "label": self._label})
        if not isinstance(answer, Mapping) or not isinstance(answer.get("observation"), str):
            raise ContractError(f"expected reset to return {{observation: text}}; found {answer!r:.100}")
        self._seen: str = answer["observation"]
        return None if self._seen == prompt else self._seen

    async def step(self, message: str) -> tuple[str, float, bool, dict[str, float]]:
        """One turn."""
        states = {"observation_text": self._seen, "action_text": message, "label": self._label, "sampling_params": None}
        answer = _checked(await self._agent.step(states))
        feedback = answer["environment_feedback"]
        self._seen += message + feedback
        logs = {**({} if answer.get("scores") is None else {"scores": answer["scores"]}), **(answer.get("extra_logs") or {})}
        parts = {name: _number(value, name) for name, value in logs.items()}
        return feedback, _number(answer["rewards"], "rewards"), bool(answer["done"]), parts


def agent_class(kind: type[object], options: Mapping[str, object]) -> type[InstanceEpisode]:
    """The environment of an agent instance's class, whose episodes are made with `options`."""
    return type(
        kind.__name__, (InstanceEpisode,), {"_agent_class": kind, "_agent_options": options, "__doc__": inspect.getdoc(kind)}
    )


def _text_of(row: Mapping[str, object]) -> str:
    """The row's prompt, without the chat template. Raises ContractError."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:
        return "\n\n".join(str(message["content"]) for message in prompt)
    raise ContractError(f"expected a column `prompt` for an AgentInstance; found the columns {sorted(row)}")


def _checked(answer: object) -> Reply:
    if not isinstance(answer, Mapping) or (missing := [key for key in _NEEDED if key not in answer]):
        found = answer if not isinstance(answer, Mapping) else f"no {missing[0]}"
        raise ContractError(f"expected step to return a dictionary with {', '.join(_NEEDED)}; found {found!r:.100}")
    for key in answer:
        if key in _REFUSED and answer[key] is not None:
            raise ContractError(f"expected no {key} from step, since {_REFUSED[key]}; found {answer[key]!r:.100}")
        if key not in _KNOWN and key not in _REFUSED:
            raise ContractError(f"expected {', '.join(sorted(_KNOWN))} from step; found {key!r:.100}")
    if not isinstance(answer["environment_feedback"], str) or not isinstance(answer.get("extra_logs") or {}, Mapping):
        raise ContractError("expected a text as environment_feedback and a dictionary as extra_logs; found others")
    return answer


def _number(value: Any, name: str) -> float:
    """A number, or a tensor of one number."""
    return finite(value.item() if hasattr(value, "item") else value, f"{name} of step")
