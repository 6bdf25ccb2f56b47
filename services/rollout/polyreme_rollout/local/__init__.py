"""A sampler in this process: an inference engine without a service, for programs of your own.

Invariant: all calls come from one thread. A call returns when the engine has answered it.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from polyreme.config.run import RunConfig
from polyreme.errors import DataError
from polyreme.weights.manifest import ArenaSource
from polyreme_rollout.engine.load import load_engine
from polyreme_rollout.engine.protocol import EngineRequest, InferenceEngine, LoadError, Sampling


@dataclass(frozen=True)
class Sampled:
    """An answer.

    Attributes:
        ids: its tokens, with the stop token if there is one.
        logprobs: the log-probability of each under the distribution that it was sampled from, in nats.
        is_complete: whether a stop token ended it, rather than the limit of tokens.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_complete: bool


class LocalSampler:
    """Samples from the policy that was loaded last. `open` starts one."""

    def __init__(self, engine: InferenceEngine, config: RunConfig, runner: asyncio.Runner) -> None:
        self._engine, self._rollout, self._runner = engine, config.rollout, runner
        self._version = self._asked = 0
        self._is_whole = True

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig) -> Iterator["LocalSampler"]:
        """Starts the engine `rollout.engine` with the weights of `model.path`, and ends it with the block.

        Raises:
            ConfigError: the engine cannot be started.
        """
        with (
            closing(load_engine(config.rollout.engine)(config, Path(config.model.path), random_weights=False)) as engine,
            asyncio.Runner() as runner,
        ):
            runner.run(engine.open())
            yield cls(engine, config, runner)

    def load(self, source: ArenaSource) -> None:
        """Replaces the policy by a version in an arena. Raises LoadError; there then is no policy until a later load succeeds."""
        self._version, self._is_whole = self._version + 1, False
        self._runner.run(self._engine.load([source]))
        self._runner.run(self._engine.resume())
        self._is_whole = True

    def sample(
        self, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], temperature: float = 1.0, seed: int = 0
    ) -> list[Sampled]:
        """One answer to each prompt, of at most `rollout.max_new_tokens` tokens.

        Args:
            prompts: token ids of each, at least one, and fewer than `rollout.max_model_len`.
            stop_ids: the tokens that end an answer.
            temperature: 0 is greedy.
            seed: of the answers' random numbers. Equal prompts get different answers.

        Raises:
            DataError: a prompt is empty, leaves no room for an answer, or has unknown tokens.
            LoadError: the last load has failed.
            EngineDeadError: the engine has died.
        """
        if not self._is_whole:
            raise LoadError("expected a version that was loaded whole; found that the last load has failed. Load one first.")
        most, vocabulary = self._engine.max_model_len - 1, range(self._engine.vocab_size)
        for number, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= most or not all(id in vocabulary for id in prompt):
                expected = f"1 to {most} tokens of a vocabulary of {len(vocabulary)} in prompt {number}"
                raise DataError(expected, f"{len(prompt)}, or others", "Shorten it, or raise rollout.max_model_len.")
        sampling = Sampling(temperature, 1.0, -1, tuple(stop_ids))

        async def answer(number: int, prompt: Sequence[int]) -> Sampled:
            self._asked += 1
            room = min(self._rollout.max_new_tokens, self._engine.max_model_len - len(prompt))
            request = EngineRequest(str(self._asked), list(prompt), room, seed * 2**20 + number, str(self._version), sampling)
            ids, logprobs, finish = list[int](), list[float](), None
            async for new in self._engine.generate(request):
                ids += new.token_ids
                logprobs += new.logprobs
                finish = new.finish
            return Sampled(tuple(ids), tuple(logprobs), finish == "stop")

        async def every() -> list[Sampled]:
            return await asyncio.gather(*(answer(number, prompt) for number, prompt in enumerate(prompts)))

        return self._runner.run(every())
