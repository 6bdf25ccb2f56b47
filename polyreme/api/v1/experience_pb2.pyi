from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_STOP: _ClassVar[Outcome]
    OUTCOME_LENGTH: _ClassVar[Outcome]
    OUTCOME_TURNS: _ClassVar[Outcome]
    OUTCOME_TOKENS: _ClassVar[Outcome]
    OUTCOME_TIME: _ClassVar[Outcome]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_STOP: Outcome
OUTCOME_LENGTH: Outcome
OUTCOME_TURNS: Outcome
OUTCOME_TOKENS: Outcome
OUTCOME_TIME: Outcome

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class RewardPart(_message.Message):
    __slots__ = ("name", "raw", "weighted", "plugin_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_FIELD_NUMBER: _ClassVar[int]
    PLUGIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    raw: float
    weighted: float
    plugin_version: str
    def __init__(self, name: _Optional[str] = ..., raw: _Optional[float] = ..., weighted: _Optional[float] = ..., plugin_version: _Optional[str] = ...) -> None: ...

class RewardCall(_message.Message):
    __slots__ = ("server", "status", "message", "seconds")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    server: str
    status: str
    message: str
    seconds: float
    def __init__(self, server: _Optional[str] = ..., status: _Optional[str] = ..., message: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("name", "arguments", "result", "seconds", "error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    result: str
    seconds: float
    error: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ..., result: _Optional[str] = ..., seconds: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("start", "end", "reward", "seconds", "tool_calls")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    reward: float
    seconds: float
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., reward: _Optional[float] = ..., seconds: _Optional[float] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ...) -> None: ...

class Episode(_message.Message):
    __slots__ = ("outcome", "messages", "seconds")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    messages: str
    seconds: float
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., messages: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("token_ids", "logprobs", "loss_mask", "finish_reason", "spans", "score", "parts", "text", "token_rewards", "teacher_logprobs", "replicas", "calls", "routes", "prompt_ids", "turns", "episode")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    TEACHER_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    loss_mask: bytes
    finish_reason: FinishReason
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    score: float
    parts: _containers.RepeatedCompositeFieldContainer[RewardPart]
    text: str
    token_rewards: bytes
    teacher_logprobs: bytes
    replicas: _containers.RepeatedScalarFieldContainer[str]
    calls: _containers.RepeatedCompositeFieldContainer[RewardCall]
    routes: bytes
    prompt_ids: bytes
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    episode: int
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., loss_mask: _Optional[bytes] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., score: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[RewardPart, _Mapping]]] = ..., text: _Optional[str] = ..., token_rewards: _Optional[bytes] = ..., teacher_logprobs: _Optional[bytes] = ..., replicas: _Optional[_Iterable[str]] = ..., calls: _Optional[_Iterable[_Union[RewardCall, _Mapping]]] = ..., routes: _Optional[bytes] = ..., prompt_ids: _Optional[bytes] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., episode: _Optional[int] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("index", "attempt", "prompt_ids", "samples", "prompt", "label", "generate_seconds", "score_seconds", "began", "episodes", "format")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    GENERATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SCORE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    index: int
    attempt: int
    prompt_ids: bytes
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    prompt: str
    label: str
    generate_seconds: float
    score_seconds: float
    began: float
    episodes: _containers.RepeatedCompositeFieldContainer[Episode]
    format: int
    def __init__(self, index: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., prompt: _Optional[str] = ..., label: _Optional[str] = ..., generate_seconds: _Optional[float] = ..., score_seconds: _Optional[float] = ..., began: _Optional[float] = ..., episodes: _Optional[_Iterable[_Union[Episode, _Mapping]]] = ..., format: _Optional[int] = ...) -> None: ...

class TrainedSamples(_message.Message):
    __slots__ = ("advantages", "weights", "steps")
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    advantages: bytes
    weights: bytes
    steps: bytes
    def __init__(self, advantages: _Optional[bytes] = ..., weights: _Optional[bytes] = ..., steps: _Optional[bytes] = ...) -> None: ...
