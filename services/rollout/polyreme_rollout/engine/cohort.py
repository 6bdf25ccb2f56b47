"""Sequences that a Hugging Face model continues together, token by token.

Invariant: each token is a function of the model, the tokens before it, the request's sampling and seed, and its place. Neither
the other sequences nor the number of times that the cohort was computed again matters, up to the rounding of sums.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from polyreme_rollout.engine.protocol import EngineRequest, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_U64 = (1 << 64) - 1
_LEAST_TEMPERATURE = 0.01
"""vLLM's, which samples at it instead of below. A quotient by less may be infinite in float32."""


@dataclass(eq=False)
class CohortRow:
    """A sequence in progress.

    Attributes:
        ids: prompt and sampled tokens. logprobs: of the sampled ones.
        state: number of sampled tokens, and `finish` of `NewTokens`. A step sets it last, so another thread may read the tokens.
        closed: nobody waits for the tokens.
    """

    request: EngineRequest
    ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    state: tuple[int, str | None] = (0, None)
    closed: bool = False

    @property
    def running(self) -> bool:
        return self.state[1] is None and not self.closed

    def add(self, token: int, logprob: float) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        count = len(self.logprobs)
        stops = token in self.request.sampling.stop_token_ids
        self.state = count, "stop" if stops else "length" if count == self.request.max_new else None


class Cohort:
    """Rows with one cache of keys and values, padded on the left to one length."""

    def __init__(self, rows: list[CohortRow]) -> None:
        self.rows = rows
        self._cache: Any = None
        self._mask = torch.empty(0)

    def forget(self) -> None:
        """Drops the cache, which weights or a device that are gone have computed. The next step computes it again."""
        self._cache = None

    @torch.inference_mode()
    def step(self, model: "PreTrainedModel") -> None:
        """Samples one token of each running row, and leaves the others out of the cohort."""
        self._leave_out_ended()
        if not self.rows:
            return
        if self._cache is None:
            longest = max(len(row.ids) for row in self.rows)
            tokens = torch.stack([pad(torch.tensor(row.ids), (longest - len(row.ids), 0)) for row in self.rows])
            lengths = torch.tensor([len(row.ids) for row in self.rows])
            self._mask = (torch.arange(longest) >= longest - lengths[:, None]).long().to(model.device)
            positions = (self._mask.cumsum(-1) - 1).clamp(min=0)
        else:
            tokens = torch.tensor([row.ids[-1:] for row in self.rows])
            self._mask = pad(self._mask, (0, 1), value=1)
            positions = self._mask.sum(-1, keepdim=True) - 1
        output = model(
            input_ids=tokens.to(model.device),
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        ids, logprobs = sample(
            output.logits[:, -1].float(), [row.request for row in self.rows], [row.state[0] for row in self.rows]
        )
        for row, token, logprob in zip(self.rows, ids, logprobs, strict=True):
            row.add(token, logprob)

    def _leave_out_ended(self) -> None:
        left = [place for place, row in enumerate(self.rows) if row.running]
        if len(left) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in left]
        if self.rows and self._cache is not None:
            chosen = torch.tensor(left, device=self._mask.device)
            self._cache.batch_select_indices(chosen)
            self._mask = self._mask[chosen]


def sample(logits: torch.Tensor, requests: list[EngineRequest], places: list[int]) -> tuple[list[int], list[float]]:
    """One token for each row of `logits` (float32 [n, vocabulary]), and its log-probability under its sampling distribution.

    A token is found by inverting the cumulative distribution at a number that seed and place determine.
    """
    greedy = torch.tensor([request.sampling.temperature == 0 for request in requests], device=logits.device)
    temperatures = [max(request.sampling.temperature or 1.0, _LEAST_TEMPERATURE) for request in requests]
    scores = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    for row, request in enumerate(requests):
        if cuts(request.sampling):
            scores[row] = cut(scores[row], request.sampling)
    logprobs = scores.log_softmax(-1)
    bounds = logprobs.double().exp().cumsum(-1)
    uniforms = [uniform(request.seed, place) for request, place in zip(requests, places, strict=True)]
    draws = torch.tensor(uniforms, dtype=bounds.dtype, device=bounds.device)
    drawn = torch.searchsorted(bounds, (draws * bounds[:, -1])[:, None], right=True)[:, 0]
    tokens = torch.where(greedy, scores.argmax(-1), drawn.clamp(max=logits.shape[-1] - 1))
    return tokens.tolist(), logprobs.gather(-1, tokens[:, None])[:, 0].tolist()


def cuts(sampling: Sampling) -> bool:
    """Whether the sampling leaves tokens out."""
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def cut(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Scores [vocabulary] with minus infinity for the tokens outside top_k and top_p."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    none: object = None  # neither reads the tokens before
    rows = scores[None]
    if sampling.top_k > 0:
        rows = TopKLogitsWarper(sampling.top_k)(none, rows)
    if sampling.top_p < 1:
        rows = TopPLogitsWarper(sampling.top_p)(none, rows)
    return rows[0]


def uniform(seed: int, place: int) -> float:
    """A number in (0, 1): the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of seed and place."""
    x = (seed + (place + 1) * 0x9E3779B97F4A7C15) & _U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
    return (((x ^ (x >> 31)) >> 11) + 0.5) / (1 << 53)
