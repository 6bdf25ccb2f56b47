from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionId(_message.Message):
    __slots__ = ("run_id", "term", "version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    term: int
    version: int
    def __init__(self, run_id: _Optional[str] = ..., term: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class TensorEntry(_message.Message):
    __slots__ = ("name", "dtype", "shape", "offset", "nbytes", "digest", "alias_of")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ALIAS_OF_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    nbytes: int
    digest: int
    alias_of: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., digest: _Optional[int] = ..., alias_of: _Optional[str] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("id", "part", "parts", "tensors", "nbytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    id: VersionId
    part: int
    parts: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    nbytes: int
    def __init__(self, id: _Optional[_Union[VersionId, _Mapping]] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., nbytes: _Optional[int] = ...) -> None: ...

class TensorDelta(_message.Message):
    __slots__ = ("changed", "words", "nbytes", "digest_before", "digest")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_BEFORE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    changed: int
    words: int
    nbytes: int
    digest_before: int
    digest: int
    def __init__(self, changed: _Optional[int] = ..., words: _Optional[int] = ..., nbytes: _Optional[int] = ..., digest_before: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class DeltaManifest(_message.Message):
    __slots__ = ("manifest", "base", "tensors")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    base: VersionId
    tensors: _containers.RepeatedCompositeFieldContainer[TensorDelta]
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., base: _Optional[_Union[VersionId, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorDelta, _Mapping]]] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("run_id", "term", "arena_path", "nonce")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    term: int
    arena_path: str
    nonce: bytes
    def __init__(self, run_id: _Optional[str] = ..., term: _Optional[int] = ..., arena_path: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class ProbeResponse(_message.Message):
    __slots__ = ("can_map", "reason")
    CAN_MAP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    can_map: bool
    reason: str
    def __init__(self, can_map: bool = ..., reason: _Optional[str] = ...) -> None: ...

class StageArenaRequest(_message.Message):
    __slots__ = ("manifest", "arena_path", "slot", "generation")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ARENA_PATH_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    arena_path: str
    slot: int
    generation: int
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., arena_path: _Optional[str] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class StageStreamRequest(_message.Message):
    __slots__ = ("manifest", "offset", "data", "delta")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    offset: int
    data: bytes
    delta: DeltaManifest
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., delta: _Optional[_Union[DeltaManifest, _Mapping]] = ...) -> None: ...

class StageStreamResponse(_message.Message):
    __slots__ = ("begin_at", "staged")
    BEGIN_AT_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    begin_at: int
    staged: StageResponse
    def __init__(self, begin_at: _Optional[int] = ..., staged: _Optional[_Union[StageResponse, _Mapping]] = ...) -> None: ...

class StageRelayRequest(_message.Message):
    __slots__ = ("manifest", "delta", "source", "timeout")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    delta: DeltaManifest
    source: str
    timeout: float
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., delta: _Optional[_Union[DeltaManifest, _Mapping]] = ..., source: _Optional[str] = ..., timeout: _Optional[float] = ...) -> None: ...

class StageRelayResponse(_message.Message):
    __slots__ = ("nbytes", "staged", "missing", "failed", "full")
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    nbytes: int
    staged: StageResponse
    missing: str
    failed: str
    full: str
    def __init__(self, nbytes: _Optional[int] = ..., staged: _Optional[_Union[StageResponse, _Mapping]] = ..., missing: _Optional[str] = ..., failed: _Optional[str] = ..., full: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("id", "part", "base", "offset")
    ID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    id: VersionId
    part: int
    base: VersionId
    offset: int
    def __init__(self, id: _Optional[_Union[VersionId, _Mapping]] = ..., part: _Optional[int] = ..., base: _Optional[_Union[VersionId, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class FindDeltaRequest(_message.Message):
    __slots__ = ("id", "part", "base")
    ID_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    id: VersionId
    part: int
    base: VersionId
    def __init__(self, id: _Optional[_Union[VersionId, _Mapping]] = ..., part: _Optional[int] = ..., base: _Optional[_Union[VersionId, _Mapping]] = ...) -> None: ...

class FindDeltaResponse(_message.Message):
    __slots__ = ("delta", "encode_seconds")
    DELTA_FIELD_NUMBER: _ClassVar[int]
    ENCODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    delta: DeltaManifest
    encode_seconds: float
    def __init__(self, delta: _Optional[_Union[DeltaManifest, _Mapping]] = ..., encode_seconds: _Optional[float] = ...) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ("verify_seconds", "apply_seconds")
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    APPLY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    verify_seconds: float
    apply_seconds: float
    def __init__(self, verify_seconds: _Optional[float] = ..., apply_seconds: _Optional[float] = ...) -> None: ...

class Canary(_message.Message):
    __slots__ = ("ids", "logprobs", "limit")
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    limit: float
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., limit: _Optional[float] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("id", "canary")
    ID_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    id: VersionId
    canary: Canary
    def __init__(self, id: _Optional[_Union[VersionId, _Mapping]] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("version", "stall_seconds", "reload_seconds", "canary_difference")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RELOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CANARY_DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    stall_seconds: float
    reload_seconds: float
    canary_difference: float
    def __init__(self, version: _Optional[int] = ..., stall_seconds: _Optional[float] = ..., reload_seconds: _Optional[float] = ..., canary_difference: _Optional[float] = ...) -> None: ...
