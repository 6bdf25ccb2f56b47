from polyreme.api.v1 import calls_pb2 as _calls_pb2
from polyreme.api.v1 import experience_pb2 as _experience_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunManyRequest(_message.Message):
    __slots__ = ("requests", "cancel")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[NumberedRunRequest]
    cancel: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[_Union[NumberedRunRequest, _Mapping]]] = ..., cancel: _Optional[_Iterable[int]] = ...) -> None: ...

class NumberedRunRequest(_message.Message):
    __slots__ = ("number", "request")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    request: RunRequest
    def __init__(self, number: _Optional[int] = ..., request: _Optional[_Union[RunRequest, _Mapping]] = ...) -> None: ...

class RunManyResponse(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[NumberedRunResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[NumberedRunResponse, _Mapping]]] = ...) -> None: ...

class NumberedRunResponse(_message.Message):
    __slots__ = ("number", "response", "status")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    number: int
    response: RunResponse
    status: _calls_pb2.CallStatus
    def __init__(self, number: _Optional[int] = ..., response: _Optional[_Union[RunResponse, _Mapping]] = ..., status: _Optional[_Union[_calls_pb2.CallStatus, _Mapping]] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("start", "answer", "delta")
    START_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    start: Start
    answer: Answer
    delta: Delta
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("row_json", "seed", "environment")
    ROW_JSON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    row_json: str
    seed: int
    environment: str
    def __init__(self, row_json: _Optional[str] = ..., seed: _Optional[int] = ..., environment: _Optional[str] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("text", "raw", "refused", "over", "is_cut", "context_tokens", "tokens", "sampled", "number", "seconds_left", "in_thought", "record", "oldest_version")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    IS_CUT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    IN_THOUGHT_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    text: str
    raw: str
    refused: str
    over: bool
    is_cut: bool
    context_tokens: int
    tokens: int
    sampled: TurnTokens
    number: int
    seconds_left: float
    in_thought: bool
    record: bytes
    oldest_version: int
    def __init__(self, text: _Optional[str] = ..., raw: _Optional[str] = ..., refused: _Optional[str] = ..., over: bool = ..., is_cut: bool = ..., context_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., sampled: _Optional[_Union[TurnTokens, _Mapping]] = ..., number: _Optional[int] = ..., seconds_left: _Optional[float] = ..., in_thought: bool = ..., record: _Optional[bytes] = ..., oldest_version: _Optional[int] = ...) -> None: ...

class SessionTurn(_message.Message):
    __slots__ = ("trajectory", "context", "ids", "logprobs", "routes", "spans", "finish_reason", "replicas", "seconds", "messages_json")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    trajectory: int
    context: bytes
    ids: bytes
    logprobs: bytes
    routes: bytes
    spans: _containers.RepeatedCompositeFieldContainer[_experience_pb2.VersionSpan]
    finish_reason: _experience_pb2.FinishReason
    replicas: _containers.RepeatedScalarFieldContainer[str]
    seconds: float
    messages_json: str
    def __init__(self, trajectory: _Optional[int] = ..., context: _Optional[bytes] = ..., ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., routes: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[_experience_pb2.VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[_experience_pb2.FinishReason, str]] = ..., replicas: _Optional[_Iterable[str]] = ..., seconds: _Optional[float] = ..., messages_json: _Optional[str] = ...) -> None: ...

class SessionExchange(_message.Message):
    __slots__ = ("request_json", "answer", "after", "calls")
    REQUEST_JSON_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    request_json: str
    answer: Answer
    after: int
    calls: _containers.RepeatedCompositeFieldContainer[_experience_pb2.ToolCall]
    def __init__(self, request_json: _Optional[str] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., after: _Optional[int] = ..., calls: _Optional[_Iterable[_Union[_experience_pb2.ToolCall, _Mapping]]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("number", "text", "context_tokens", "in_thought")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IN_THOUGHT_FIELD_NUMBER: _ClassVar[int]
    number: int
    text: str
    context_tokens: int
    in_thought: bool
    def __init__(self, number: _Optional[int] = ..., text: _Optional[str] = ..., context_tokens: _Optional[int] = ..., in_thought: bool = ...) -> None: ...

class TurnTokens(_message.Message):
    __slots__ = ("context_ids", "ids", "logprobs", "texts")
    CONTEXT_IDS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    context_ids: _containers.RepeatedScalarFieldContainer[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, context_ids: _Optional[_Iterable[int]] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("ask", "ending", "withdrawal")
    ASK_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWAL_FIELD_NUMBER: _ClassVar[int]
    ask: Ask
    ending: Ending
    withdrawal: Withdrawal
    def __init__(self, ask: _Optional[_Union[Ask, _Mapping]] = ..., ending: _Optional[_Union[Ending, _Mapping]] = ..., withdrawal: _Optional[_Union[Withdrawal, _Mapping]] = ...) -> None: ...

class Withdrawal(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("messages", "reward", "seconds", "tools_json", "calls", "agent", "rewards")
    class RewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    reward: float
    seconds: float
    tools_json: str
    calls: _containers.RepeatedCompositeFieldContainer[_experience_pb2.ToolCall]
    agent: AgentRequest
    rewards: _containers.ScalarMap[int, float]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., reward: _Optional[float] = ..., seconds: _Optional[float] = ..., tools_json: _Optional[str] = ..., calls: _Optional[_Iterable[_Union[_experience_pb2.ToolCall, _Mapping]]] = ..., agent: _Optional[_Union[AgentRequest, _Mapping]] = ..., rewards: _Optional[_Mapping[int, float]] = ...) -> None: ...

class AgentRequest(_message.Message):
    __slots__ = ("messages_json", "tools_json", "after", "max_tokens", "temperature", "prompt", "context_ids", "stop", "wants_tokens", "number", "streams", "stop_ids", "session", "records")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    WANTS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    messages_json: str
    tools_json: str
    after: int
    max_tokens: int
    temperature: float
    prompt: str
    context_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    wants_tokens: bool
    number: int
    streams: bool
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    session: str
    records: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, messages_json: _Optional[str] = ..., tools_json: _Optional[str] = ..., after: _Optional[int] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., prompt: _Optional[str] = ..., context_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., wants_tokens: bool = ..., number: _Optional[int] = ..., streams: bool = ..., stop_ids: _Optional[_Iterable[int]] = ..., session: _Optional[str] = ..., records: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Ending(_message.Message):
    __slots__ = ("reward", "parts", "error", "seconds", "calls", "rewards")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class RewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    REWARD_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    reward: float
    parts: _containers.ScalarMap[str, float]
    error: str
    seconds: float
    calls: _containers.RepeatedCompositeFieldContainer[_experience_pb2.ToolCall]
    rewards: _containers.ScalarMap[int, float]
    def __init__(self, reward: _Optional[float] = ..., parts: _Optional[_Mapping[str, float]] = ..., error: _Optional[str] = ..., seconds: _Optional[float] = ..., calls: _Optional[_Iterable[_Union[_experience_pb2.ToolCall, _Mapping]]] = ..., rewards: _Optional[_Mapping[int, float]] = ...) -> None: ...
