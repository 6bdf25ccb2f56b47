from polyreme.api.v1 import experience_pb2 as _experience_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCORE_STATUS_UNSPECIFIED: _ClassVar[ScoreStatus]
    SCORE_STATUS_OK: _ClassVar[ScoreStatus]
    SCORE_STATUS_ERROR: _ClassVar[ScoreStatus]
    SCORE_STATUS_TIMEOUT: _ClassVar[ScoreStatus]
    SCORE_STATUS_INVALID: _ClassVar[ScoreStatus]
SCORE_STATUS_UNSPECIFIED: ScoreStatus
SCORE_STATUS_OK: ScoreStatus
SCORE_STATUS_ERROR: ScoreStatus
SCORE_STATUS_TIMEOUT: ScoreStatus
SCORE_STATUS_INVALID: ScoreStatus

class ScoreItem(_message.Message):
    __slots__ = ("key", "prompt", "response", "response_raw", "label", "metadata_json", "templated_prompt", "token_ids", "token_texts", "messages_json")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_RAW_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    METADATA_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATED_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    key: str
    prompt: str
    response: str
    response_raw: str
    label: str
    metadata_json: str
    templated_prompt: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_texts: _containers.RepeatedScalarFieldContainer[str]
    messages_json: str
    def __init__(self, key: _Optional[str] = ..., prompt: _Optional[str] = ..., response: _Optional[str] = ..., response_raw: _Optional[str] = ..., label: _Optional[str] = ..., metadata_json: _Optional[str] = ..., templated_prompt: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., token_texts: _Optional[_Iterable[str]] = ..., messages_json: _Optional[str] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("run_id", "items")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    items: _containers.RepeatedCompositeFieldContainer[ScoreItem]
    def __init__(self, run_id: _Optional[str] = ..., items: _Optional[_Iterable[_Union[ScoreItem, _Mapping]]] = ...) -> None: ...

class ScoreResult(_message.Message):
    __slots__ = ("key", "status", "score", "parts", "message", "token_rewards")
    KEY_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    key: str
    status: ScoreStatus
    score: float
    parts: _containers.RepeatedCompositeFieldContainer[_experience_pb2.RewardPart]
    message: str
    token_rewards: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, key: _Optional[str] = ..., status: _Optional[_Union[ScoreStatus, str]] = ..., score: _Optional[float] = ..., parts: _Optional[_Iterable[_Union[_experience_pb2.RewardPart, _Mapping]]] = ..., message: _Optional[str] = ..., token_rewards: _Optional[_Iterable[float]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ScoreResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ScoreResult, _Mapping]]] = ...) -> None: ...

class ListRewardsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RewardInfo(_message.Message):
    __slots__ = ("name", "weight", "version", "description", "correctness", "reads_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CORRECTNESS_FIELD_NUMBER: _ClassVar[int]
    READS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    version: str
    description: str
    correctness: bool
    reads_tokens: bool
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ..., version: _Optional[str] = ..., description: _Optional[str] = ..., correctness: bool = ..., reads_tokens: bool = ...) -> None: ...

class ListRewardsResponse(_message.Message):
    __slots__ = ("api", "rewards")
    API_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    api: int
    rewards: _containers.RepeatedCompositeFieldContainer[RewardInfo]
    def __init__(self, api: _Optional[int] = ..., rewards: _Optional[_Iterable[_Union[RewardInfo, _Mapping]]] = ...) -> None: ...
