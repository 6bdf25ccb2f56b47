"""The JSON requests of the Tinker API (SDK 0.38), and its names of saved models.

Invariant: pure. A request that cannot be executed as it stands is refused, and the message names what is not supported.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from polyreme_trainer.service.errors import TenantError

MAX_TOPK = 20
"""Most log-probabilities of a prompt's token: those of vLLM's default."""
METADATA_BYTES = 16 << 10
"""Most bytes of a client's own data of a session, a model or a checkpoint."""
Id = Annotated[str, Field(max_length=200)]
Seq = Annotated[int, Field(ge=1, lt=2**31)]
Number = Annotated[int, Field(ge=0, lt=10**9)]
"""Of a model or a sampling session of a session."""
Life = Annotated[float, Field(gt=0, le=10 * 366 * 86400)]
"""Seconds until a checkpoint may be deleted: at most ten years."""
_NUMBERS = frozenset({"learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm", "temperature", "top_p"})
_CRITIC = ":critic"
_MODEL = r"[0-9a-f]{32}:train:[0-9]{1,9}"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_PATH = re.compile(rf"tinker://({_MODEL})/(weights|sampler_weights|external_weights)/({_NAME})")

Kind = Literal["weights", "sampler_weights", "external_weights"]
"""To continue from, to sample from, and PEFT's files to download."""


@dataclass(frozen=True)
class SavedModel:
    """A saved model."""

    model: str
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


def name_of(base_model: str, critic: bool) -> str:
    """The name by which clients ask for a model on a base model; a critic is a variant of it."""
    return base_model + _CRITIC if critic else base_model


def read_path(text: str) -> SavedModel:
    """The checkpoint of a tinker:// path. Raises TenantError."""
    found = _PATH.fullmatch(text)
    if found is None:
        raise TenantError(f"expected tinker://MODEL/KIND/NAME with a KIND of {', '.join(get_args(Kind))}; found {text!r:.200}")
    kind: Any = found[2]
    return SavedModel(found[1], kind, found[3])


def check_model(name: str) -> str:
    """A model's name. Raises TenantError."""
    if re.fullmatch(_MODEL, name) is None:
        raise TenantError(f"expected a training run as SESSION:train:NUMBER; found {name!r:.200}")
    return name


def check_seq(seq: int) -> None:
    """The number of a request for a model. Raises TenantError."""
    if seq < 1:
        raise TenantError(f"expected a seq_id from 1; found {seq}")


def check_length(found: int, longest: int) -> None:
    """The tokens of a sequence. Raises TenantError."""
    if found > longest:
        raise TenantError(f"expected at most {longest} tokens in a sequence, max_context_length of the base model; found {found}")


def check_name(name: str) -> str:
    """A checkpoint's name. Raises TenantError."""
    if re.fullmatch(_NAME, name) is None:
        raise TenantError(
            f"expected a name of up to 128 letters, digits and . _ - that begins with none of . and -; found {name!r:.200}"
        )
    return name


class Message(BaseModel):
    """A JSON request. Keys that are null count as missing; unknown keys are refused by name."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), frozen=True)
    type: str = ""
    user_metadata: dict[str, Any] = {}

    @field_validator("user_metadata")
    @classmethod
    def _is_small(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Raises ValueError, as `encode` does for what is no text, and `dumps` for what is no JSON."""
        if (found := len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())) > METADATA_BYTES:
            raise ValueError(f"expected at most {METADATA_BYTES} bytes; found {found}")
        return value


AnyMessage = TypeVar("AnyMessage", bound=Message)


class LoraOptions(Message):
    rank: int = Field(ge=0, le=1024)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(Message):
    type: Literal["adamw", "adam"] = "adamw"


class CreateSession(Message):
    tags: list[str] = Field([], max_length=100)
    sdk_version: str = ""
    display_name: str = Field("", max_length=1000)


class FinishReason(Message):
    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSession(Message):
    reason: FinishReason = FinishReason()
    detail: str = ""


class CreateModel(Message):
    session_id: Id
    model_seq_id: Number
    base_model: str
    lora_config: LoraOptions | None = None
    optimizer_config: OptimizerKind = OptimizerKind()


class AdamSettings(Message):
    type: Literal["adamw", "adam", ""] = ""
    learning_rate: float = Field(1e-4, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0, allow_inf_nan=False)


class OfModel(Message):
    model_id: Id


class InOrder(OfModel):
    """The place of a request in the order of a model's requests."""

    seq_id: Seq


class OptimStep(InOrder):
    adam_params: AdamSettings | None = None
    optimizer_params: AdamSettings | None = None

    @property
    def settings(self) -> AdamSettings:
        return self.optimizer_params or self.adam_params or AdamSettings()


class SaveWeights(InOrder):
    path: str | None = None
    ttl_seconds: Life | None = None
    overwrite: bool = False

    @property
    def name(self) -> str:
        """The checkpoint's name, also of one whose client gives it none."""
        return f"request-{self.seq_id}" if self.path is None else self.path


class SaveExternal(InOrder):
    path: str
    ttl_seconds: Life | None = None


class SaveForSampler(SaveWeights):
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeights(Message):
    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    path: str
    optimizer: bool = False
    optimizer_config: OptimizerKind = OptimizerKind()


class SamplingSession(Message):
    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class OpenAgentSession(Message):
    """Of which of the three it samples: the base model without any."""

    sampling_session_id: Id | None = None
    base_model: str | None = None
    model_path: str | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63)


class TextChunk(Message):
    type: Literal["encoded_text", ""] = ""
    tokens: list[int] = Field(max_length=1 << 20)


class SamplePrompt(Message):
    chunks: list[TextChunk] = Field(min_length=1, max_length=1 << 16)


MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_IDS = 64, 1000, 1024
"""Most strings that end an answer, and characters of each; most tokens that end one."""


class SamplingOptions(Message):
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    top_p: float = Field(1.0, gt=0, le=1)

    @field_validator("stop", mode="before")
    @classmethod
    def _can_end(cls, value: object) -> object:
        """Raises ValueError for what can end no answer, or takes too long to be found in one."""
        stops = [value] if isinstance(value, str) else value
        if isinstance(stops, list):
            if len(stops) <= MAX_STOPS and all(isinstance(each, str) and 0 < len(each) <= MAX_STOP_CHARACTERS for each in stops):
                return value
            if len(stops) <= MAX_STOP_IDS and all(type(each) is int and 0 <= each < 2**31 for each in stops):
                return value
        strings = f"a string of 1 to {MAX_STOP_CHARACTERS} characters, up to {MAX_STOPS} of them"
        raise ValueError(f"expected {strings}, or up to {MAX_STOP_IDS} token ids")


class Sample(Message):
    num_samples: int = Field(1, ge=1, le=1024)
    prompt: SamplePrompt
    sampling_params: SamplingOptions
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: Id | None = None
    seq_id: int | None = Field(None, ge=0, lt=2**63)
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    topk_prompt_logprobs: int = Field(0, ge=0, le=MAX_TOPK)
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] = False


class Ttl(Message):
    ttl_seconds: Life | None = None


class Page(Message):
    limit: int = Field(ge=1)
    offset: int = Field(ge=0)


class TinkerPath(Message):
    tinker_path: str


class Retrieve(Message):
    request_id: Id
    allow_metadata_only: bool = False


class OfSession(Message):
    session_id: Id


def read(kind: type[AnyMessage], body: bytes) -> AnyMessage:
    """A JSON request. Raises TenantError."""
    return read_tree(kind, _tree(body))


def read_place(body: bytes) -> tuple[str, int]:
    """The model and the number of a JSON request, whatever else it has. Raises TenantError."""
    given = read_tree(InOrder, {key: value for key, value in _tree(body).items() if key in ("model_id", "seq_id")})
    return given.model_id, given.seq_id


def has_place(body: bytes) -> bool:
    """Whether a JSON request names a model and a number. Raises TenantError."""
    return {"model_id", "seq_id"} <= _tree(body).keys()


def _tree(body: bytes) -> dict[str, object]:
    try:
        tree = json.loads(body or b"{}")
        if not isinstance(tree, dict):
            raise TenantError(f"expected a JSON object; found {type(tree).__name__}")
        return {key: without_nulls(value) for key, value in tree.items() if value is not None}
    except (ValueError, RecursionError) as error:
        raise TenantError(f"expected JSON; found {error}") from None


def read_tree(kind: type[AnyMessage], tree: Mapping[str, Any]) -> AnyMessage:
    """A request from its keys. Raises TenantError."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise TenantError("; ".join(_explain(each) for each in error.errors()[:3])) from None


def without_nulls(tree: Any) -> Any:
    """A JSON value without the keys that are null, except numbers: the SDK writes NaN and infinity as null."""
    if isinstance(tree, dict):
        return {key: without_nulls(value) for key, value in tree.items() if value is not None or key in _NUMBERS}
    return [without_nulls(value) for value in tree] if isinstance(tree, list) else tree


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]).encode("ascii", "backslashreplace").decode()[:200]
    if problem["input"] is None:
        return f"{where}: expected a finite number; found null, as which the SDK sends NaN and infinity"
    if problem["type"] in ("extra_forbidden", "literal_error"):
        return f"not supported: {where} = {problem['input']!r:.80}"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}; found {problem['input']!r:.80}"
