"""The protocols of reward servers, as pure functions.

Invariant: decoding a reply returns one outcome per item of the request, or raises BadReply. Only the native protocol
has one number per token; the others refuse a list in place of a number.

paddlenlp: {"src", "tgt", "response"} -> {"error_code", "error_msg", "score"}; errors have HTTP status 200.
openrlhf: {"query", "prompts", "labels"} -> {"rewards"[, "scores"][, "extra_logs"]}.
native: POST /v1/score of this service, with a status per item.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polyreme_reward.items import Item, Outcome, Status, failed, outcome_of


class BadReply(Exception):
    """A reply without scores. `status` applies to its items. `again` states whether a retry may help."""

    def __init__(self, message: str, status: Status = Status.ERROR, again: bool = False) -> None:
        super().__init__(message)
        self.status, self.again = status, again


@dataclass(frozen=True)
class Protocol:
    """`encode` returns the JSON body. `decode` takes the JSON object of a 200 reply and the items of the request."""

    encode: Callable[[Sequence[Item]], dict[str, Any]]
    decode: Callable[[dict[str, object], Sequence[Item]], list[Outcome]]


def parse(http_status: int, body: bytes, protocol: Protocol, items: Sequence[Item]) -> list[Outcome]:
    """The outcomes in an HTTP reply, one per item. Raises BadReply."""
    if http_status != 200:
        excerpt = body[:300].decode("utf-8", "replace").strip()
        raise BadReply(
            f"expected HTTP 200; found {http_status}: {excerpt}", again=http_status >= 500 or http_status in (408, 425, 429)
        )
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadReply(f"expected JSON; found {body[:100]!r} ({error})", Status.INVALID) from None
    if not isinstance(tree, dict):
        raise BadReply(f"expected a JSON object; found a {type(tree).__name__}", Status.INVALID)
    return protocol.decode(tree, items)


def _encode_paddlenlp(items: Sequence[Item]) -> dict[str, object]:
    return {"src": [i.seen for i in items], "tgt": [i.label for i in items], "response": [i.raw for i in items]}


def _decode_paddlenlp(tree: dict[str, object], items: Sequence[Item]) -> list[Outcome]:
    if tree.get("error_code") != 0:
        raise BadReply(f"expected error_code 0; found {tree.get('error_code')!r}: {str(tree.get('error_msg'))[:1000]}")
    return [outcome_of(score) for score in _column(tree, "score", len(items))]


def _encode_openrlhf(items: Sequence[Item]) -> dict[str, object]:
    return {"query": [i.seen + i.raw for i in items], "prompts": [i.seen for i in items], "labels": [i.label for i in items]}


def _decode_openrlhf(tree: dict[str, object], items: Sequence[Item]) -> list[Outcome]:
    count = len(items)
    rewards = _column(tree, "rewards", count)
    named: dict[str, list[object]] = {}
    logs = tree.get("extra_logs")
    for name, values in [("scores", tree.get("scores")), *(logs.items() if isinstance(logs, dict) else ())]:
        if isinstance(values, list) and len(values) == count:
            named[name] = values
    return [
        outcome_of({**{name: values[k] for name, values in named.items()}, "score": reward}) for k, reward in enumerate(rewards)
    ]


def _encode_native(items: Sequence[Item]) -> dict[str, object]:
    return {
        "items": [
            {
                "key": i.key,
                "prompt": i.prompt,
                "templated_prompt": i.templated_prompt,
                "response": i.response,
                "response_raw": i.response_raw,
                "label": i.label,
                "metadata": i.metadata,
                **({"token_ids": list(i.token_ids), "token_texts": list(i.token_texts)} if i.token_ids else {}),
                **({"messages": i.messages} if i.messages_json else {}),
            }
            for i in items
        ]
    }


def _decode_native(tree: dict[str, object], items: Sequence[Item]) -> list[Outcome]:
    outcomes = []
    for item, result in zip(items, _column(tree, "results", len(items)), strict=True):
        fields = result if isinstance(result, dict) else {}
        status = fields.get("status")
        if status == "ok":
            parts = fields.get("parts")
            named = (
                {p["name"]: p.get("raw") for p in parts if isinstance(p, dict) and isinstance(p.get("name"), str)}
                if isinstance(parts, list)
                else {}
            )
            answer = {"score": fields.get("score"), "token_rewards": fields.get("token_rewards")}
            outcomes.append(outcome_of({**named, **answer}, len(item.token_ids)))
        elif status in ("error", "timeout", "invalid"):
            outcomes.append(failed(Status[status.upper()], str(fields.get("message", ""))))
        else:
            outcomes.append(failed(Status.INVALID, f"expected a result with a status; found {str(result)[:200]}"))
    return outcomes


def _column(tree: dict[str, object], name: str, count: int) -> list[object]:
    values = tree.get(name)
    if not isinstance(values, list):
        raise BadReply(f"expected a list under {name!r}; found {str(values)[:100]!r}", Status.INVALID)
    if len(values) != count:
        raise BadReply(f"expected {count} values under {name!r}; found {len(values)}", Status.INVALID)
    return values


PROTOCOLS = {
    "paddlenlp": Protocol(_encode_paddlenlp, _decode_paddlenlp),
    "openrlhf": Protocol(_encode_openrlhf, _decode_openrlhf),
    "native": Protocol(_encode_native, _decode_native),
}
