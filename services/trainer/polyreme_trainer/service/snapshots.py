"""A snapshot for samplers is loaded by the sampler, and compared with the learner, before its client hears of it."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme.experience.requests import LOAD, LogPlace, RequestLog
from polyreme_trainer.learner.gates import LIMITS
from polyreme_trainer.service.batch import Batch, FloatArray, LossCall
from polyreme_trainer.service.wire import Request

logger = logging.getLogger(__name__)

CANARY_TOKENS = 16
LOAD_SECONDS = 60.0


@dataclass(frozen=True)
class SnapshotProbe:
    """The sequence on which learner and sampler are compared, int64 [n], the largest `mismatch_kl` between them, and for how many
    seconds a snapshot waits for a sampler that is busy or starts again. Its first request loads it then."""

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


@dataclass(frozen=True)
class Snapshot:
    """Weights in a directory, and the learner's log-probabilities of the canary with them, float32 [n - 1]."""

    folder: Path
    logprobs: FloatArray


async def load_snapshot(log: RequestLog, place: LogPlace, snapshot: Snapshot, canary: SnapshotProbe) -> str | None:
    """Lets the sampler load a snapshot. Returns why it must not be used; None if it may, or the sampler has not answered in time.

    Args:
        place: the request that has written it.
    """
    ask = LogPlace(f"{place.id}{LOAD}", "sampler")
    fields = {
        "weights": str(snapshot.folder),
        "prompt": canary.ids.tolist(),
        "samples": 0,
        "prompt_logprobs": True,
        "max_tokens": 1,
    }
    plain = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop_ids": [], "stop_strings": []}
    await log.submit(ask, Request("sample", fields | plain).pack())
    found = await log.result(ask.id, canary.seconds)
    if found is None:
        logger.warning("%s: no answer of the sampler within %g s; its weights are not compared", place.id, canary.seconds)
        return None
    if found[:1] != b"P":
        return str(json.loads(found[1:])["error"])
    sampled = np.frombuffer(pb.SampleResponse.FromString(found[1:]).prompt_logprobs, "<f4")[1:]
    return canary.mismatch(snapshot.logprobs, sampled)
