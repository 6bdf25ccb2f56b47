"""Gates: before training begins, the learner, the Hugging Face model and the replicas must be the same policy.

Invariant: each gate is one number with a limit, and a run does not train after a failed gate; GateError has both numbers. A
replica that does not answer neither passes nor fails: ReplicaLostError. This module queries the replicas and checks the limits;
the engine computes the numbers.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import numpy as np
from numpy.typing import NDArray

from polyreme.api.v1 import rollout_pb2 as pb
from polyreme.api.v1 import rollout_pb2_grpc as pb_grpc
from polyreme.config.security import SecurityConfig
from polyreme.errors import GateError
from polyreme.experience.metric_records import GateMeasured
from polyreme.net import rpc
from polyreme_trainer.learner.leader import join, split

PROMPTS = 4
SAMPLES = 4
NEW_TOKENS = 32
CALL_SECONDS = 120.0
IGNORE = -100
"""The target of positions without a loss, as in torch's cross entropy."""

logger = logging.getLogger(__name__)


class ReplicaLostError(Exception):
    """A replica died or stopped responding before it answered."""


@dataclass(frozen=True)
class GateLimits:
    """The largest differences that rounding can explain, for one dtype of the weights."""

    logits: float
    """Largest difference between a logit of the learner and of the Hugging Face model."""
    greedy: float
    """Largest log-probability by which the Hugging Face model may prefer another token to the replica's greedy choice."""
    mismatch_kl: float
    """Per token, between learner and replica; also the limit of the alarm during training."""


LIMITS = {"float32": GateLimits(1e-3, 1e-3, 1e-4), "bfloat16": GateLimits(0.5, 0.15, 1e-2)}


@dataclass(frozen=True)
class Gate:
    """A gate's outcome: `value` must not exceed `limit`. `fix` says what to do when it does."""

    name: str
    value: float
    limit: float
    fix: str

    def check(self) -> None:
        """Raises GateError when the gate failed; a value that is not a number fails."""
        if not self.value <= self.limit:
            raise GateError(f"{self.name} of at most {self.limit:g}", f"{self.value:g}", self.fix)
        logger.info("gate %s: %.3g (limit %.3g)", self.name, self.value, self.limit)

    def record(self) -> GateMeasured:
        """The gate's record in the run's metrics."""
        return GateMeasured(name=self.name, value=self.value, limit=self.limit)


@dataclass(frozen=True)
class Answer:
    """A replica's response to a prompt, both int64 [length], and the log-probabilities that it reported, float32 [response]."""

    prompt: NDArray[np.int64]
    response: NDArray[np.int64]
    logprobs: NDArray[np.float32]


def encode_answers(greedy: Sequence[Answer], sampled: Sequence[Answer]) -> bytes:
    """Answers as bytes for `decode_answers`."""
    answers = [part for a in (*greedy, *sampled) for part in (a.prompt.tobytes(), a.response.tobytes(), a.logprobs.tobytes())]
    return join([np.int64(len(greedy)).tobytes(), *answers])


def decode_answers(data: bytes) -> tuple[list[Answer], list[Answer]]:
    """The greedy and the sampled answers given to `encode_answers`."""
    count, *parts = split(data)
    answers = [
        Answer(np.frombuffer(prompt, np.int64), np.frombuffer(response, np.int64), np.frombuffer(logprobs, np.float32))
        for prompt, response, logprobs in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]
    greedy = int(np.frombuffer(count, np.int64)[0])
    return answers[:greedy], answers[greedy:]


def stack(answers: Sequence[Answer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The model's inputs and targets, int64 [answers, w]. Targets are IGNORE except on the responses.

    Padding is on the right, so the earlier positions of a causal model do not depend on it.
    """
    width = max(len(answer.prompt) + len(answer.response) for answer in answers) - 1
    ids = np.zeros((len(answers), width), dtype=np.int64)
    targets = np.full_like(ids, IGNORE)
    for row, answer in enumerate(answers):
        tokens = np.concatenate([answer.prompt, answer.response])
        ids[row, : len(tokens) - 1] = tokens[:-1]
        targets[row, len(answer.prompt) - 1 : len(tokens) - 1] = tokens[len(answer.prompt) :]
    return ids, targets


@dataclass(frozen=True)
class Questions:
    """The same questions for every replica.

    Attributes:
        prompts: int64 [length] each.
        max_new: the largest number of tokens of an answer.
        version: the oldest policy version that may answer.
        idle_timeout: seconds without a message after which a call counts as lost.
        security: the security of the replicas' ports.
    """

    run_id: str
    prompts: Sequence[NDArray[np.int64]]
    stop_ids: Sequence[int]
    max_new: int
    version: int
    idle_timeout: float
    security: SecurityConfig | None = None


async def ask_replica(address: str, questions: Questions, temperature: float, samples: int) -> list[Answer]:
    """`samples` responses of one replica to each prompt through Generate; temperature 0 is greedy.

    Raises:
        ReplicaLostError: a call failed, or returned nothing for too long.
    """
    async with rpc.connect(address, questions.security) as channel:
        stub = pb_grpc.RolloutServiceStub(channel)
        calls = (_ask(stub, questions, prompt, temperature, samples) for prompt in questions.prompts)
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]


async def _ask(
    stub: pb_grpc.RolloutServiceStub, questions: Questions, prompt: NDArray[np.int64], temperature: float, samples: int
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
            async with asyncio.timeout(questions.idle_timeout):
                message = await anext(stream, None)
            if message is None:
                break
            for chunk in message.chunks:
                ids[chunk.slot].append(np.frombuffer(chunk.token_ids, "<i4"))
                logprobs[chunk.slot].append(np.frombuffer(chunk.logprobs, "<f4"))
    except grpc.aio.AioRpcError as error:
        raise ReplicaLostError(f"{error.code().name}: {error.details()}") from None
    except TimeoutError:
        raise ReplicaLostError(f"no token within {questions.idle_timeout:g} s") from None
    except asyncio.CancelledError:
        if not rpc.channel_closed():
            raise
        raise ReplicaLostError("the server or the channel closed during the call") from None
    return [
        Answer(prompt, np.concatenate(i).astype(np.int64), np.concatenate(p).astype(np.float32))
        for i, p in zip(ids, logprobs, strict=True)
    ]
