"""What a Generate call asks, checked: every refusal says what was expected and what came. Pure."""

from dataclasses import dataclass

from polyreme.api.v1 import rollout_pb2 as pb
from polyreme_rollout.sequences import unpack_ids

_SEED_BITS = (1 << 63) - 1  # samplers take signed 64-bit seeds


class InvalidRequestError(ValueError):
    """The request can never be served, by this replica or its peers."""


@dataclass(frozen=True)
class Limits:
    """Args: max_model_len: tokens of prompt, prefix and response; vocab_size; max_slots: under way at once, queued ones included."""

    max_model_len: int
    vocab_size: int
    max_slots: int


@dataclass(frozen=True)
class SlotPlan:
    """One slot as the engine will see it: `prompt_ids` is prompt and prefix."""

    index: int
    prompt_ids: list[int]
    max_new: int
    seed: int


def plan_slots(request: pb.GenerateRequest, run_id: str, limits: Limits) -> list[SlotPlan]:
    """Raises InvalidRequestError."""
    if request.run_id != run_id:
        raise InvalidRequestError(f"this replica serves run {run_id}, not {request.run_id or 'one without a name'}")
    sampling = request.sampling
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or (sampling.top_k < 1 and sampling.top_k != -1):
        raise InvalidRequestError(
            "expected temperature >= 0, 0 < top_p <= 1, top_k >= 1 or -1; found "
            f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}"
        )
    unknown = [id for id in sampling.stop_token_ids if not 0 <= id < limits.vocab_size]
    if unknown:
        raise InvalidRequestError(f"stop token ids {unknown} are not in the vocabulary of {limits.vocab_size}")
    prompt = _ids(request.prompt_ids, "prompt", limits)
    if not prompt:
        raise InvalidRequestError("the prompt is empty")
    if not request.slots:
        raise InvalidRequestError("no slots are asked for")
    if len({slot.index for slot in request.slots}) != len(request.slots):
        raise InvalidRequestError("a slot index occurs twice")
    return [_plan(slot, prompt, limits) for slot in request.slots]


def _plan(slot: pb.Slot, prompt: list[int], limits: Limits) -> SlotPlan:
    prefix = _ids(slot.prefix_ids, f"prefix of slot {slot.index}", limits)
    if slot.max_new < 1:
        raise InvalidRequestError(f"slot {slot.index} asks for no new token")
    total = len(prompt) + len(prefix) + slot.max_new
    if total > limits.max_model_len:
        raise InvalidRequestError(
            f"slot {slot.index}: prompt {len(prompt)} + prefix {len(prefix)} + max_new {slot.max_new} = {total} tokens; "
            f"this replica's context holds {limits.max_model_len} (rollout.max_model_len)"
        )
    return SlotPlan(slot.index, prompt + prefix, slot.max_new, slot.seed & _SEED_BITS)


def _ids(data: bytes, what: str, limits: Limits) -> list[int]:
    try:
        ids = unpack_ids(data)
    except ValueError as error:
        raise InvalidRequestError(f"{what}: {error}") from None
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        raise InvalidRequestError(f"{what}: ids from {min(ids)} to {max(ids)}; the vocabulary has {limits.vocab_size}")
    return ids
