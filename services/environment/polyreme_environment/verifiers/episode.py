"""What an env server says of an episode while it runs and at its end.

Invariant: an episode has a reward only if it is ok, complete and scored. An answered run (`success`) says nothing of that. Pure.
"""

from dataclasses import dataclass, field

from polyreme_environment.agents.result import Result
from polyreme_environment.contract import ContractError, Reply, finite, numbers

_SHOWN = 500


class UnscoredEpisodeError(Exception):
    """The episode has failed, so it has no reward."""


@dataclass
class _Trace:
    """What is known of a trace: numbers of its nodes and calls, its errors, and the fields that were set."""

    counts: dict[str, int] = field(default_factory=lambda: {"nodes": 0, "calls": 0})
    errors: list[object] = field(default_factory=list)
    fields: dict[str, object] = field(default_factory=dict)


class EpisodeDeltas:
    """An episode, from its deltas."""

    def __init__(self) -> None:
        self._traces: dict[str, _Trace] = {}

    def add(self, delta: Reply) -> None:
        """Takes the next delta. Raises one of INVALID_MESSAGE."""
        if delta.get("discard"):
            self._traces.pop(delta["trace"], None)
            return
        trace = self._traces.setdefault(delta["trace"], _Trace())
        for name in trace.counts:
            trace.counts[name] += len(delta.get(name, ()))
        trace.errors += delta.get("errors", ())
        trace.fields |= delta.get("set") or {}

    def result(self, reply: Reply) -> Result:
        """The reward of the episode and its metrics, from the reply that ends it.

        Raises:
            UnscoredEpisodeError: it has failed.
            ContractError: it is not understood, or has more than one agent. And one of INVALID_MESSAGE.
        """
        if not reply["success"]:
            raise UnscoredEpisodeError(f"{reply.get('error')}"[:_SHOWN])
        head = reply["head"]
        for told in reply["traces"]:
            known = self._traces.get(told["id"])
            if known is None or known.counts != {name: told[name] for name in known.counts}:
                raise ContractError(f"expected the trace {told}; found {known and known.counts}")
        traces = [self._traces[told["id"]] for told in reply["traces"]]
        if not head["ok"]:
            errors = [*head["errors"], *(error for trace in traces for error in trace.errors)]
            raise UnscoredEpisodeError("; ".join(f"{each['type']}: {each['message']}" for each in errors)[:_SHOWN] or "not ok")
        if len(traces) != 1:
            raise ContractError(f"expected one agent in an episode; found {len(traces)} traces, whose rewards are not one")
        return _scored(traces[0].fields)


def _scored(fields: Reply) -> Result:
    rewards = fields.get("rewards") or {}
    if missing := [name for name, each in rewards.items() if each is None]:
        raise UnscoredEpisodeError(f"the rewards {missing} were not computed")
    scores = numbers({name: each["score"] for name, each in rewards.items()}, "the rewards")
    weights = numbers({name: each["weight"] for name, each in rewards.items()}, "the weights of rewards")
    total = sum(score * weights[name] for name, score in scores.items())
    metrics = {name: value for name, value in (fields.get("metrics") or {}).items() if value is not None}
    return Result(finite(total, "reward") if rewards else None, scores | numbers(metrics, "the metrics"))
