"""A snapshot for samplers is loaded by the sampler, and compared with the learner, before its client hears of it."""

import json
import logging
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme.experience.requests import LOAD, LogPlace, RequestLog
from polyreme_trainer.learner.gates import LIMITS
from polyreme_trainer.service.batch import Batch, FloatArray, LossCall
from polyreme_trainer.service.messages import SavedModel
from polyreme_trainer.service.states import States
from polyreme_trainer.service.wire import Request, failure

logger = logging.getLogger(__name__)

CANARY_TOKENS = 16
LOAD_SECONDS = 60.0


@dataclass(frozen=True)
class SnapshotProbe:
    """The sequence on which learner and sampler are compared, int64 [n], the largest `mismatch_kl` between them, and for how many
    seconds a client waits for a sampler that is busy or starts again. The snapshot is compared later then."""

    ids: NDArray[np.int64]
    limit: float
    seconds: float = LOAD_SECONDS

    @classmethod
    def of(cls, vocabulary: int, longest: int, dtype: str) -> Self:
        """The canary of a model, always the same. `longest`: the most tokens of prompt and answer; `dtype`: of the weights."""
        ids = np.random.default_rng(0).integers(0, vocabulary, min(CANARY_TOKENS, longest - 1), dtype=np.int64)
        return cls(ids, LIMITS[dtype].mismatch_kl)

    @property
    def call(self) -> LossCall:
        """The batch whose log-probabilities are those of the canary."""
        weights = {"weights": np.ones(len(self.ids) - 1, dtype=np.float32)}
        return LossCall(Batch([self.ids[:-1]], [self.ids[1:]], weights), "cross_entropy", {})

    def mismatch(self, learned: FloatArray, sampled: FloatArray) -> str | None:
        """What is wrong with a sampler's log-probabilities; None when they are the learner's up to rounding.

        The measure is the mean of exp(d) - 1 - d, with d the learner's log-probability minus the sampler's: an estimate of KL.
        """
        difference = learned.astype(np.float64) - sampled.astype(np.float64)
        value = float((np.exp(difference) - 1 - difference).mean())
        if value <= self.limit:
            return None
        return (
            f"expected a mismatch_kl of at most {self.limit:g} between learner and sampler; found {value:g}. "
            "Save the weights again."
        )

    def problem(self, found: bytes, snapshot: "Snapshot") -> str | None:
        """Why a snapshot must not be used, by the sampler's answer; None: it may."""
        if found[:1] != b"P":
            return str(json.loads(found[1:])["error"])
        sampled = np.frombuffer(pb.SampleResponse.FromString(found[1:]).prompt_logprobs, "<f4")[1:]
        return self.mismatch(snapshot.logprobs, sampled)


@dataclass(frozen=True)
class Snapshot:
    """Weights that were saved, and the learner's log-probabilities of the canary with them, float32 [n - 1]."""

    saved: SavedModel
    logprobs: FloatArray


async def finish_compared(
    log: RequestLog, states: States, place: LogPlace, result: bytes, snapshot: Snapshot, canary: SnapshotProbe
) -> None:
    """Finishes a request with its result once the sampler has loaded the snapshot that it wrote. One with other log-probabilities
    gives its place back to what it has replaced, also after its client has heard of it."""
    ask = LogPlace(f"{place.id}{LOAD}", "sampler")
    weights, scoring = str(states.folder(snapshot.saved).resolve()), {"samples": 0, "prompt_logprobs": True, "max_tokens": 1}
    await log.submit(ask, Request("sample", {"weights": weights, "prompt": canary.ids.tolist(), **scoring}).pack())
    if (found := await log.result(ask.id, canary.seconds)) is None:
        logger.warning("%s: no answer of the sampler within %g s; its weights are compared later", place.id, canary.seconds)
        await log.finish(place, result)
        found = await log.result(ask.id, log.limits.result_seconds)
        found = found if found is not None and found[:1] == b"P" else None  # an error now says nothing about the weights
    problem = None if found is None else canary.problem(found, snapshot)
    if problem is not None:
        logger.error("model %s: %s", place.lane, problem)
    states.settle(snapshot.saved, place.seq, is_good=problem is None)
    await log.finish(place, result if problem is None else failure(problem, "server"))
