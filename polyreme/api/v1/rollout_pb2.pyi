from polyreme.api.v1 import calls_pb2 as _calls_pb2
from polyreme.api.v1 import experience_pb2 as _experience_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Slot(_message.Message):
    __slots__ = ("index", "prefix_ids", "max_new", "seed")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PREFIX_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    index: int
    prefix_ids: bytes
    max_new: int
    seed: int
    def __init__(self, index: _Optional[int] = ..., prefix_ids: _Optional[bytes] = ..., max_new: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "stop_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("run_id", "request_id", "prompt_ids", "slots", "sampling", "min_version", "exact_version", "gather_ms")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    GATHER_MS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    request_id: str
    prompt_ids: bytes
    slots: _containers.RepeatedCompositeFieldContainer[Slot]
    sampling: SamplingParams
    min_version: int
    exact_version: int
    gather_ms: int
    def __init__(self, run_id: _Optional[str] = ..., request_id: _Optional[str] = ..., prompt_ids: _Optional[bytes] = ..., slots: _Optional[_Iterable[_Union[Slot, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., min_version: _Optional[int] = ..., exact_version: _Optional[int] = ..., gather_ms: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("slot", "token_ids", "logprobs", "oldest_version", "routes")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    token_ids: bytes
    logprobs: bytes
    oldest_version: int
    routes: bytes
    def __init__(self, slot: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., oldest_version: _Optional[int] = ..., routes: _Optional[bytes] = ...) -> None: ...

class SlotEnd(_message.Message):
    __slots__ = ("slot", "finish_reason", "spans")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    finish_reason: _experience_pb2.FinishReason
    spans: _containers.RepeatedCompositeFieldContainer[_experience_pb2.VersionSpan]
    def __init__(self, slot: _Optional[int] = ..., finish_reason: _Optional[_Union[_experience_pb2.FinishReason, str]] = ..., spans: _Optional[_Iterable[_Union[_experience_pb2.VersionSpan, _Mapping]]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("chunks", "ends")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[Chunk]
    ends: _containers.RepeatedCompositeFieldContainer[SlotEnd]
    def __init__(self, chunks: _Optional[_Iterable[_Union[Chunk, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[SlotEnd, _Mapping]]] = ...) -> None: ...

class GenerateManyRequest(_message.Message):
    __slots__ = ("requests", "cancel")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[NumberedRequest]
    cancel: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, requests: _Optional[_Iterable[_Union[NumberedRequest, _Mapping]]] = ..., cancel: _Optional[_Iterable[int]] = ...) -> None: ...

class NumberedRequest(_message.Message):
    __slots__ = ("number", "request")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    request: GenerateRequest
    def __init__(self, number: _Optional[int] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class GenerateManyResponse(_message.Message):
    __slots__ = ("responses",)
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[NumberedResponse]
    def __init__(self, responses: _Optional[_Iterable[_Union[NumberedResponse, _Mapping]]] = ...) -> None: ...

class NumberedResponse(_message.Message):
    __slots__ = ("number", "response", "status")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    number: int
    response: GenerateResponse
    status: _calls_pb2.CallStatus
    def __init__(self, number: _Optional[int] = ..., response: _Optional[_Union[GenerateResponse, _Mapping]] = ..., status: _Optional[_Union[_calls_pb2.CallStatus, _Mapping]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("run_id", "replica_id", "api", "model_fingerprint", "has_version", "version", "max_model_len", "outstanding_tokens", "quarantined", "engine")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    API_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HAS_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    replica_id: str
    api: int
    model_fingerprint: str
    has_version: bool
    version: int
    max_model_len: int
    outstanding_tokens: int
    quarantined: bool
    engine: str
    def __init__(self, run_id: _Optional[str] = ..., replica_id: _Optional[str] = ..., api: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., has_version: bool = ..., version: _Optional[int] = ..., max_model_len: _Optional[int] = ..., outstanding_tokens: _Optional[int] = ..., quarantined: bool = ..., engine: _Optional[str] = ...) -> None: ...
