"""Gates: before anything is trained on, three parties must be the same policy: learner, Hugging Face model, replicas.

Each gate reduces to one number with a limit. Beyond it training would go on with wrong weights or wrong log-probabilities and
look healthy, so it raises GateError with the numbers. A replica that does not answer has told nothing: ReplicaLostError, never a verdict.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from torch import Tensor

from polyreme.api.v1 import rollout_pb2 as pb
from polyreme.api.v1 import rollout_pb2_grpc as pb_grpc
from polyreme.config.security import SecurityConfig
from polyreme.errors import GateError
from polyreme.net import rpc
from polyreme_trainer.algorithms.losses import mismatch_kl
from polyreme_trainer.megatron.batch import IGNORE, FloatArray, IntArray

log = logging.getLogger(__name__)

PROMPTS = 4
SAMPLES = 4
NEW_TOKENS = 32
CALL_SECONDS = 120.0


class ReplicaLostError(Exception):
    """A replica was gone, or stood still, before it had answered."""


@dataclass(frozen=True)
class Limits:
    """What rounding explains, by the dtype of the weights."""

    logits: float
    """Largest difference of a logit between learner and Hugging Face model."""
    greedy: float
    """Most that the Hugging Face model may prefer another token than the replica's greedy choice, as log-probability."""
    mismatch_kl: float
    """Per token, learner against replica; also the running alarm's limit."""


LIMITS = {"float32": Limits(1e-3, 1e-3, 1e-4), "bfloat16": Limits(0.5, 0.15, 1e-2)}


@dataclass(frozen=True)
class Gate:
    """A gate's outcome: `value` must not exceed `limit`. `do` tells what to look at when it does."""

    name: str
    value: float
    limit: float
    do: str

    def check(self) -> None:
        """Raises GateError when the gate is not passed; a value that is not a number does not pass."""
        if not self.value <= self.limit:
            raise GateError(f"{self.name} of at most {self.limit:g}", f"{self.value:g}", self.do)
        log.info("gate %s: %.3g (limit %.3g)", self.name, self.value, self.limit)

    def record(self) -> dict[str, Any]:
        """For the run's metrics."""
        return {"kind": "gate", "name": self.name, "value": self.value, "limit": self.limit}


@dataclass(frozen=True)
class Answer:
    """A replica's response to a prompt, both int64 [length], and the log-probabilities it reported, float32 [response]."""

    prompt: IntArray
    response: IntArray
    logprobs: FloatArray


def probe_ids(vocab: int, length: int, seed: int) -> Tensor:
    """Random tokens, int64 [4, length]."""
    return torch.from_numpy(np.random.default_rng([seed, 0x9A7E]).integers(0, vocab, (4, length)))


def load_hf(path: Path, dtype: str) -> torch.nn.Module:
    """The Hugging Face model of a directory, on the CPU, in evaluation mode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
    return model.requires_grad_(False).eval()


def logits_gate(learner: Tensor, model: torch.nn.Module, ids: Tensor, limits: Limits) -> Gate:
    """Learner's logits [b, s, vocab] of `ids` [b, s] against the Hugging Face model's."""
    with torch.no_grad():
        difference = (model(input_ids=ids).logits.float() - learner.cpu()).abs().max()
    return Gate(
        "largest logit difference between learner and Hugging Face model",
        float(difference),
        limits.logits,
        "Report it with the model's config.json: the trainer computes another function than transformers does.",
    )


def greedy_gate(model: torch.nn.Module, answers: Sequence[Answer], limits: Limits) -> Gate:
    """A replica's greedy answers under the Hugging Face model of the same weights.

    One forward pass over prompt and answer tells, token by token, whether the model would have chosen the same; near ties, which
    rounding decides, are within the limit. Answers go one by one, and logits are of responses only: they are large.
    """
    gaps = []
    for answer in answers:
        ids, response = torch.from_numpy(np.concatenate([answer.prompt, answer.response])), torch.from_numpy(answer.response)
        with torch.no_grad():
            logits = model(input_ids=ids[None, :-1], logits_to_keep=len(response)).logits[0].float()
        gaps.append((logits.amax(-1) - logits.gather(1, response[:, None])[:, 0]).max())
    return Gate(
        "log-probability by which the Hugging Face model prefers another token than a replica's greedy one",
        float(torch.stack(gaps).max()),
        limits.greedy,
        "The replica serves other weights than were pushed, or its engine computes them wrongly; do not train with it.",
    )


def replica_gate(learner: Tensor, answers: Sequence[Answer], limits: Limits) -> Gate:
    """Learner's log-probabilities of sampled answers, float32 [answers, w] as `stack` lays them out, against the replica's own."""
    behaviour = torch.from_numpy(np.concatenate([answer.logprobs for answer in answers]))
    mask = stack(answers)[1] != IGNORE
    return Gate(
        "mismatch_kl per token between learner and replica",
        float(mismatch_kl(learner.cpu()[mask], behaviour).mean()),
        limits.mismatch_kl,
        "Check that trainer and replica use the same dtype and temperature, and that the replica's logprobs are processed_logprobs.",
    )


def stack(answers: Sequence[Answer]) -> tuple[Tensor, Tensor]:
    """What a model reads and what it should say next: ids and targets, int64 [answers, w]; IGNORE but for the responses.

    Padding is on the right, where a causal model's earlier positions do not see it.
    """
    width = max(len(answer.prompt) + len(answer.response) for answer in answers) - 1
    ids = torch.zeros(len(answers), width, dtype=torch.int64)
    targets = torch.full_like(ids, IGNORE)
    for row, answer in enumerate(answers):
        tokens = torch.from_numpy(np.concatenate([answer.prompt, answer.response]))
        ids[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, len(answer.prompt) - 1 : len(tokens) - 1] = tokens[len(answer.prompt) :]
    return ids, targets


@dataclass(frozen=True)
class Questions:
    """What replicas are asked, all in the same way.

    Attributes:
        prompts: int64 [length] each.
        max_new: tokens of an answer at most.
        version: the oldest policy that may answer.
        silence: seconds that a call may bring nothing.
        security: of the replicas' ports.
    """

    run_id: str
    prompts: Sequence[IntArray]
    stop_ids: Sequence[int]
    max_new: int
    version: int
    silence: float
    security: SecurityConfig | None = None


async def ask_replica(address: str, questions: Questions, temperature: float, samples: int) -> list[Answer]:
    """`samples` responses of one replica to each prompt through Generate; temperature 0 is greedy.

    Raises:
        ReplicaLostError: a call broke, or brought nothing for too long.
    """
    async with rpc.connect(address, questions.security) as channel:
        stub = pb_grpc.RolloutServiceStub(channel)
        calls = (_ask(stub, questions, prompt, temperature, samples) for prompt in questions.prompts)
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]


async def _ask(
    stub: pb_grpc.RolloutServiceStub, questions: Questions, prompt: IntArray, temperature: float, samples: int
) -> list[Answer]:
    request = pb.GenerateRequest(
        run_id=questions.run_id,
        request_id=f"gate-{uuid.uuid4().hex}",
        prompt_ids=prompt.astype("<i4").tobytes(),
        slots=[pb.Slot(index=i, max_new=questions.max_new, seed=i + 1) for i in range(samples)],
        sampling=pb.SamplingParams(temperature=temperature, top_p=1.0, top_k=-1, stop_token_ids=questions.stop_ids),
        min_version=questions.version,
    )
    ids: list[list[np.ndarray]] = [[] for _ in range(samples)]
    logprobs: list[list[np.ndarray]] = [[] for _ in range(samples)]
    try:
        stream = aiter(stub.Generate(request, timeout=CALL_SECONDS))
        while True:
            async with asyncio.timeout(questions.silence):
                message = await anext(stream, None)
            if message is None:
                break
            for chunk in message.chunks:
                ids[chunk.slot].append(np.frombuffer(chunk.token_ids, "<i4"))
                logprobs[chunk.slot].append(np.frombuffer(chunk.logprobs, "<f4"))
    except grpc.aio.AioRpcError as error:
        raise ReplicaLostError(f"{error.code().name}: {error.details()}") from None
    except TimeoutError:
        raise ReplicaLostError(f"no token within {questions.silence:g} s") from None
    except asyncio.CancelledError:
        if not rpc.channel_closed():
            raise
        raise ReplicaLostError("its server or the channel closed under the call") from None
    return [
        Answer(prompt, np.concatenate(i).astype(np.int64), np.concatenate(p).astype(np.float32))
        for i, p in zip(ids, logprobs, strict=True)
    ]
