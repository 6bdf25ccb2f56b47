"""A turn that an agent asked for.

Invariant: an agent whose request gets no turn is told why, and its episode goes on: its reward comes with its end. A turn begins
before the first wait, so turns begin in the order of their requests.
"""

import json
from collections.abc import Callable, Sequence

import numpy as np
from google.protobuf.message import DecodeError

from polyreme.api.v1.environment_pb2 import AgentRequest, Answer, Delta, SessionTurn, TurnTokens
from polyreme.api.v1.experience_pb2 import OUTCOME_TIME, OUTCOME_TOKENS, OUTCOME_TURNS
from polyreme.dataset.chat import Message, read_chat
from polyreme.dataset.columns import TokenIds
from polyreme.errors import DataError
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError
from polyreme_trainer.orchestrator.environment.session import EpisodeOverError, EpisodeSession, SampledTurn

_BOUNDS: dict[int, str] = {
    OUTCOME_TURNS: "the episode has reached environment.max_turns",
    OUTCOME_TOKENS: "the conversation has reached rollout.max_model_len",
    OUTCOME_TIME: "the episode has reached environment.max_seconds",
}


async def agent_turn(request: AgentRequest, session: EpisodeSession, tell: Callable[[Delta], None]) -> Answer:
    """The turn, or why there is none. `tell` is told of it as it is sampled, if the request is streamed.

    Raises:
        EpisodeError: the request is none that an environment server may send.
        GenerateError, UnavailableError: see `EpisodeSession.answer`.
    """
    if request.after and request.after not in session:
        raise EpisodeError(f"expected messages that follow a complete turn; found turn {request.after}")
    if request.HasField("temperature") and request.temperature != session.temperature:
        found = f"expected rollout.temperature = {session.temperature:g} of the run; found {request.temperature:g}"
        return Answer(refused=f"{found}. Remove `temperature`.")
    try:
        turn = await _sampled(request, session, tell)
    except EpisodeOverError as over:
        return Answer(refused=_BOUNDS[over.outcome], over=True)
    except DataError as error:
        return Answer(refused=str(error))
    raw = "" if turn.raw == turn.text else turn.raw
    in_thought = session.opens_thought(turn.context)
    answer = Answer(text=turn.text, raw=raw, is_cut=turn.is_cut, in_thought=in_thought)
    answer.context_tokens, answer.tokens = len(turn.context), len(turn.ids)
    if request.wants_tokens:
        answer.sampled.CopyFrom(
            TurnTokens(context_ids=turn.context, ids=turn.ids, logprobs=turn.logprobs, texts=session.token_texts(turn))
        )
    return answer


async def kept_turn(request: AgentRequest, session: EpisodeSession, tell: Callable[[Delta], None]) -> Answer:
    """`agent_turn` in a session that is kept elsewhere, as the request tells it: the answer has the record that continues it.

    Raises:
        DataError: the session's turns cannot be read. Also what `agent_turn` raises.
    """
    for record in request.records:
        session.restore(parsed_turn(record))
    answer = await agent_turn(request, session, tell)
    answer.number = request.number
    if not answer.refused:
        kept = session.kept()
        answer.record, answer.oldest_version = kept.SerializeToString(), min(span.version for span in kept.spans)
    return answer


def parsed_turn(record: bytes) -> SessionTurn:
    """A turn as it is kept. Raises DataError."""
    try:
        return SessionTurn.FromString(record)
    except DecodeError as error:
        raise unreadable("a turn of a session", error) from None


def unreadable(what: str, error: Exception) -> DataError:
    """The error of something in the log that cannot be read."""
    return DataError(f"{what} as it is kept in the log", str(error), "Run the release that has kept it.")


async def _sampled(request: AgentRequest, session: EpisodeSession, tell: Callable[[Delta], None]) -> SampledTurn:
    prompt: str | TokenIds | None = TokenIds(request.context_ids) or (request.prompt if request.HasField("prompt") else None)
    messages: Sequence[Message] = ()
    if prompt is None:
        chat = read_chat(json.loads(request.messages_json), "`messages`", request.tools_json or None)
        session.tools, messages = None if chat.tools is None else list(chat.tools), chat.messages

    def goes_on(context: np.ndarray, text: str) -> None:
        in_thought = session.opens_thought(context)
        tell(Delta(number=request.number, text=text, context_tokens=len(context), in_thought=in_thought))

    return await session.answer(
        messages,
        number=request.number,
        after=request.after,
        max_tokens=request.max_tokens or None,
        prompt=prompt,
        stop=request.stop,
        stop_ids=request.stop_ids,
        tell=goes_on if request.streams else None,
    )
