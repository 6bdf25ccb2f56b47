"""Checks a Generate request and turns it into sequences. Pure.

Invariant: every refusal states what was expected and what was found.
"""

from dataclasses import dataclass

from polyreme.api.v1 import rollout_pb2 as pb
from polyreme_rollout.generation.sequences import unpack_ids

_SEED_BITS = (1 << 63) - 1  # samplers take signed 64-bit seeds


class InvalidRequestError(ValueError):
    """No replica of this run can serve the request."""


@dataclass(frozen=True)
class RequestLimits:
    """Args: max_model_len: tokens of prompt, prefix and response; vocab_size; max_sequences: running and queued."""

    max_model_len: int
    vocab_size: int
    max_sequences: int


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence of a Generate call. `prompt_ids` is the prompt followed by the prefix."""

    index: int
    prompt_ids: list[int]
    max_new: int
    seed: int


def parse_sequences(request: pb.GenerateRequest, run_id: str, limits: RequestLimits) -> list[SequenceRequest]:
    """Raises InvalidRequestError."""
    if request.run_id != run_id:
        raise InvalidRequestError(f"expected a request of run {run_id}; found run {request.run_id or 'without a name'}")
    sampling = request.sampling
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or (sampling.top_k < 1 and sampling.top_k != -1):
        raise InvalidRequestError(
            "expected temperature >= 0, 0 < top_p <= 1, top_k >= 1 or -1; found "
            f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}"
        )
    unknown = [id for id in sampling.stop_token_ids if not 0 <= id < limits.vocab_size]
    if unknown:
        raise InvalidRequestError(f"expected stop token ids in the vocabulary of {limits.vocab_size}; found {unknown}")
    prompt = _ids(request.prompt_ids, "prompt", limits)
    if not prompt:
        raise InvalidRequestError("expected a prompt of at least one token; found none")
    if not request.slots:
        raise InvalidRequestError("expected at least one sequence; found none")
    indices = [sequence.index for sequence in request.slots]
    if len(set(indices)) != len(indices):
        raise InvalidRequestError(f"expected distinct sequence indices; found {indices}")
    return [_parse(sequence, prompt, limits) for sequence in request.slots]


def _parse(sequence: pb.Slot, prompt: list[int], limits: RequestLimits) -> SequenceRequest:
    name = f"sequence {sequence.index}"
    prefix = _ids(sequence.prefix_ids, f"prefix of {name}", limits)
    if sequence.max_new < 1:
        raise InvalidRequestError(f"{name}: expected max_new of at least 1; found {sequence.max_new}")
    total = len(prompt) + len(prefix) + sequence.max_new
    if total > limits.max_model_len:
        raise InvalidRequestError(
            f"{name}: expected at most {limits.max_model_len} tokens (rollout.max_model_len); "
            f"found prompt {len(prompt)} + prefix {len(prefix)} + max_new {sequence.max_new} = {total}"
        )
    return SequenceRequest(sequence.index, prompt + prefix, sequence.max_new, sequence.seed & _SEED_BITS)


def _ids(data: bytes, what: str, limits: RequestLimits) -> list[int]:
    try:
        ids = unpack_ids(data)
    except ValueError as error:
        raise InvalidRequestError(f"{what}: {error}") from None
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        raise InvalidRequestError(
            f"{what}: expected ids in the vocabulary of {limits.vocab_size}; found ids from {min(ids)} to {max(ids)}"
        )
    return ids
