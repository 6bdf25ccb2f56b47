"""Tokens in, tokens out, as vLLM's /inference/v1/generate and the renderers of verifiers have it. See `Api`."""

from collections.abc import Callable, Mapping

from polyreme.dataset.chat import Message
from polyreme_environment.agents.apis.chat import error
from polyreme_environment.agents.apis.completions import CompletionEvents, read_ids
from polyreme_environment.agents.reply import AgentTurn, usage
from polyreme_environment.agents.request import (
    IGNORED,
    SAMPLING,
    Asked,
    Keys,
    TurnRequest,
    bad,
    digest,
    read_bound,
    read_stop,
    read_temperature,
)

__all__ = ["error", "events", "read", "reply"]

_KEYS = Keys(
    frozenset(["token_ids", "sampling_params"]), {"stream": (False,)}, IGNORED | {"request_id", "cache_salt", "priority"}
)
_PARAMETERS = Keys(
    frozenset(["temperature", "max_tokens", "stop", "stop_token_ids"]),
    {**SAMPLING, "logprobs": (0, 1), "prompt_logprobs": (), "ignore_eos": (False,), "include_stop_str_in_output": (False,)},
    frozenset(
        [
            "seed",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
            "output_kind",
            "routed_experts_prompt_start",
        ]
    ),
)


def read(asked: Asked, history: Callable[[str], list[Message]]) -> TurnRequest:
    _KEYS.check(asked)
    parameters = asked.get("sampling_params") or {}
    if not isinstance(parameters, Mapping):
        raise bad(f"expected `sampling_params` to be an object; found {parameters!r:.100}. Fix the request.")
    _PARAMETERS.check(parameters)
    return TurnRequest(
        digest("inference", asked),
        prompt=read_ids(asked.get("token_ids"), "token_ids"),
        max_tokens=read_bound(parameters, "max_tokens"),
        temperature=read_temperature(parameters),
        stop=read_stop(parameters, "stop"),
        stop_ids=read_ids(parameters["stop_token_ids"], "stop_token_ids") if parameters.get("stop_token_ids") else (),
        wants_tokens=True,
    )


def reply(asked: Asked, turn: AgentTurn) -> dict[str, object]:
    assert turn.sampled is not None
    # vLLM names a token by `token_id`, where the renderers expect `token`.
    pairs = zip(turn.sampled.ids, turn.sampled.logprobs, strict=True)
    content = [{"token": f"token_id:{id}", "token_id": id, "logprob": number, "top_logprobs": []} for id, number in pairs]
    choice = {"index": 0, "token_ids": list(turn.sampled.ids), "logprobs": {"content": content}}
    choice |= {"finish_reason": "length" if turn.is_cut else "stop", "stop_reason": turn.stopped_by}
    head = {"request_id": f"generate-{turn.id}", "created": turn.created, "model": str(asked.get("model") or "")}
    return {**head, "choices": [choice], "prompt_token_ids": list(turn.sampled.context_ids), "usage": usage(turn)}


events = CompletionEvents  # no request is streamed
