"""The answers of the service's sampler: the real log and sampler around a simulated engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from safetensors.numpy import save_file

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme.experience.requests import LogPlace, RequestLog
from polyreme.process.supervisor import STARTS_WITHOUT_MEMORY
from polyreme_rollout.testing.simulated_engine import Lengths, SimulatedInferenceEngine
from polyreme_trainer.megatron.atomic import new_directory
from polyreme_trainer.service.wire import Request
from polyreme_trainer.testing.simulated_tenants import WEIGHT
from support.simulated_service import LONGEST, VOCAB, AdapterEngine, sample
from support.waiting import until

PROMPT = [5, 9, 14, 7]


class Sampler:
    """Asks the sampler of a log. A request without a number of its own gets the next one."""

    def __init__(self, log: RequestLog) -> None:
        self._log, self._asked = log, 0

    async def ask(self, number: int | None = None, **given: Any) -> bytes:
        self._asked += 1
        fields = {"weights": None, "prompt": PROMPT, "samples": 1, "max_tokens": 8, "seed": 1, "temperature": 1.0, "top_k": -1}
        fields |= {
            "top_p": 1.0,
            "stop_ids": [],
            "stop_strings": [],
            "prompt_logprobs": False,
            "prompt_logprobs_last": None,
            "topk": 0,
        }
        place = LogPlace(f"{'a' * 32}:sample:0:{self._asked if number is None else number}", "sampler")
        await self._log.submit(place, Request("sample", fields | given).pack())
        result = await self._log.result(place.id, 60.0)
        assert result is not None
        return result

    async def answer(self, **given: Any) -> pb.SampleResponse:
        result = await self.ask(**given)
        assert result[:1] == b"P", result
        return pb.SampleResponse.FromString(result[1:])

    async def tokens(self, **given: Any) -> list[list[int]]:
        return [ids(each) for each in (await self.answer(**given)).sequences]


def ids(sequence: pb.SampledSequence) -> list[int]:
    assert len(sequence.tokens) == len(sequence.logprobs)
    return np.frombuffer(sequence.tokens, "<i4").tolist()


@pytest.fixture
async def sampler(redis: Redis, run_id: str) -> AsyncIterator[Sampler]:
    log = RequestLog(redis, run_id)
    async with log.following():
        others = asyncio.all_tasks()
        task = asyncio.create_task(sample(log, asyncio.Event()))
        yield Sampler(log)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() <= {*others, asyncio.current_task()}, "a task outlives the sampler"


async def test_a_seed_decides_the_answers(sampler: Sampler) -> None:
    several, again, other = [await sampler.tokens(samples=3, seed=seed) for seed in (7, 7, 8)]
    assert several == again != other
    assert len({tuple(answer) for answer in several}) == 3
    first, second = [await sampler.tokens(seed=None) for _ in range(2)]
    assert first != second, "without a seed, each request has its own"
    assert await sampler.ask(number=1) == await sampler.ask(number=1), "a repeated request has its first answer"


async def test_a_name_that_is_saved_again_has_new_weights(sampler: Sampler, tmp_path: Path) -> None:
    answers = []
    for value in (1, 2):
        with new_directory(tmp_path / "saved") as folder:
            save_file({WEIGHT: np.full(32, value, dtype=np.uint8)}, folder / "model.safetensors")
        answers.append(await sampler.tokens(weights=str(tmp_path / "saved")))
    assert answers[0] != answers[1]


async def test_models_may_take_turns_as_often_as_they_like(sampler: Sampler, tmp_path: Path) -> None:
    """Only loads that have ended their process count against a model."""
    with new_directory(tmp_path / "saved") as folder:
        save_file({WEIGHT: np.full(32, 7, dtype=np.uint8)}, folder / "model.safetensors")
    weights = [str(tmp_path / "saved"), None] * (STARTS_WITHOUT_MEMORY + 1)
    answers = [await sampler.tokens(weights=each) for each in weights]
    assert all(answer == answers[place % 2] for place, answer in enumerate(answers))


async def test_a_model_may_be_missing_as_often_as_it_likes(sampler: Sampler, tmp_path: Path) -> None:
    weights = str(tmp_path / "saved")
    for _ in range(STARTS_WITHOUT_MEMORY + 1):
        assert b"ended" not in await sampler.ask(weights=weights)
    with new_directory(tmp_path / "saved") as folder:
        save_file({WEIGHT: np.full(32, 7, dtype=np.uint8)}, folder / "model.safetensors")
    assert await sampler.tokens(weights=weights)


@pytest.fixture
async def adapters(redis: Redis, run_id: str) -> AsyncIterator[tuple[Sampler, AdapterEngine]]:
    """A sampler whose engine has room for two adapters."""
    log, engine = RequestLog(redis, run_id), AdapterEngine()
    async with log.following():
        task = asyncio.create_task(sample(log, asyncio.Event(), engine))
        yield Sampler(log), engine
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def save_adapter(path: Path, value: int, rank: int = 4) -> str:
    with new_directory(path) as folder:
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
        (folder / "adapter_model.safetensors").write_bytes(bytes([value]))
        save_file({WEIGHT: np.full(32, value, dtype=np.uint8)}, folder / "model.safetensors")
    return str(path)


async def test_adapters_run_together_as_the_engine_has_room(adapters: tuple[Sampler, AdapterEngine], tmp_path: Path) -> None:
    """Of four adapters that take turns; one that the engine has dropped is read again."""
    sampler, engine = adapters
    engine.step_seconds = 0.002
    paths = [save_adapter(tmp_path / str(number), number) for number in range(4)]
    alone = [await sampler.tokens(weights=path) for path in paths]
    assert len({str(answers) for answers in alone}) == 4
    assert await asyncio.gather(*(sampler.tokens(weights=path) for path in paths * 3)) == alone * 3
    assert engine.most == 2
    assert len(engine.read) > len(set(engine.read)) == 4


async def test_an_adapter_that_running_requests_use_is_not_loaded_again(
    adapters: tuple[Sampler, AdapterEngine], tmp_path: Path
) -> None:
    """When none uses it any more, the engine may have dropped it."""
    sampler, engine = adapters
    engine.step_seconds = 0.01
    path = save_adapter(tmp_path / "saved", 1)
    running = asyncio.create_task(sampler.tokens(weights=path, max_tokens=200))
    await until(lambda: engine.running.total() == 1)
    await asyncio.gather(*(sampler.tokens(weights=path, max_tokens=2) for _ in range(5)))
    assert engine.loads == 1
    await running
    await sampler.tokens(max_tokens=2)  # of the base model
    await sampler.tokens(weights=path, max_tokens=2)
    assert engine.loads == 2


async def test_an_adapter_that_is_saved_again_is_another_version(adapters: tuple[Sampler, AdapterEngine], tmp_path: Path) -> None:
    """Running requests keep the one that they began with."""
    sampler, engine = adapters
    engine.step_seconds = 0.01
    path = save_adapter(tmp_path / "saved", 1)
    first = await sampler.tokens(weights=path)
    running = asyncio.create_task(sampler.tokens(weights=path, max_tokens=64))
    await until(lambda: engine.running.total() == 1)
    save_adapter(tmp_path / "saved", 2)
    second = await sampler.tokens(weights=path)
    assert (await running)[0][: len(first[0])] == first[0] != second[0]
    assert len(engine.read) == 2


async def test_a_damaged_adapter_is_an_error_of_its_requests(adapters: tuple[Sampler, AdapterEngine], tmp_path: Path) -> None:
    sampler, _ = adapters
    path = save_adapter(tmp_path / "saved", 1)
    (tmp_path / "saved" / "model.safetensors").unlink()
    (tmp_path / "saved" / "adapter_config.json").write_text("")
    assert b'"category": "server"' in await sampler.ask(weights=path)
    assert await sampler.tokens(), "of the base model"


async def test_an_answer_is_reported_while_another_is_sampled(
    adapters: tuple[Sampler, AdapterEngine], redis: Redis, run_id: str, tmp_path: Path
) -> None:
    sampler, engine = adapters
    records, path = RequestLog(redis, run_id).records, save_adapter(tmp_path / "saved", 1)
    engine.step_seconds = 60.0
    endless = asyncio.create_task(sampler.tokens(weights=path))
    await until(lambda: engine.running.total() == 1)
    engine.step_seconds = 0.0
    await sampler.tokens(weights=path)

    async def is_reported() -> bool:
        return len(await records.read("0", 10, 1)) == 1

    await until(is_reported)
    assert not endless.done()
    endless.cancel()
    with suppress(asyncio.CancelledError):
        await endless


async def test_a_rank_above_the_engines_is_loaded_alone(adapters: tuple[Sampler, AdapterEngine], tmp_path: Path) -> None:
    sampler, engine = adapters
    wide, narrow = save_adapter(tmp_path / "wide", 1, rank=16), save_adapter(tmp_path / "narrow", 1)
    answers = await asyncio.gather(*(sampler.tokens(weights=path) for path in (narrow, wide, narrow, wide, None)))
    assert answers[0] == answers[2] and answers[1] == answers[3]
    assert [name.partition(" ")[0] for name in engine.read] == [narrow]


class Ending(SimulatedInferenceEngine):
    """An engine whose process ends as it loads anything but the base model."""

    async def load(self, sources: Any) -> Any:
        if sources[0].generation > 2:
            raise MemoryError
        return await super().load(sources)


async def test_weights_that_end_each_start_are_given_up(redis: Redis, run_id: str, tmp_path: Path) -> None:
    """Before the service would end. Other requests are answered."""
    log, path = RequestLog(redis, run_id), save_adapter(tmp_path / "saved", 1)
    async with log.following():
        sampler = Sampler(log)
        asking = [asyncio.create_task(sampler.ask(weights=weights)) for weights in (path, path, None)]
        for starts in range(STARTS_WITHOUT_MEMORY):
            ending = Ending(frozenset({WEIGHT}), LONGEST, VOCAB, lengths=Lengths(mean=16))
            sampling = asyncio.create_task(sample(RequestLog(redis, run_id), asyncio.Event(), ending))
            if starts < STARTS_WITHOUT_MEMORY - 1:
                with pytest.raises(MemoryError):
                    await sampling
        refused, again, answer = await asyncio.gather(*asking)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
    assert b"ended 2 times" in refused and refused == again and answer[:1] == b"P"


async def test_stops_end_an_answer(sampler: Sampler) -> None:
    """The simulated tokenizer writes each token as its number, and a blank between two."""
    [whole] = await sampler.tokens()
    assert len(whole) == 8
    [by_id] = await sampler.tokens(stop_ids=[whole[3]])
    [by_string] = await sampler.tokens(stop_strings=[f"{whole[2]} {whole[3]}"])
    end = whole.index(whole[3]) + 1
    assert (by_id, by_string) == (whole[:end], whole[:4])
    stopped = (await sampler.answer(stop_ids=[whole[3]])).sequences[0]
    assert (stopped.stop_reason, (await sampler.answer()).sequences[0].stop_reason) == (
        pb.STOP_REASON_STOP,
        pb.STOP_REASON_LENGTH,
    )


async def test_a_prompt_has_log_probabilities(sampler: Sampler) -> None:
    answer = await sampler.answer(prompt_logprobs=True, topk=3)
    values = np.frombuffer(answer.prompt_logprobs, "<f4")
    top = answer.topk_prompt_logprobs
    tokens, logprobs = (np.frombuffer(each, kind).reshape(4, 3) for each, kind in ((top.token_ids, "<i4"), (top.logprobs, "<f4")))
    assert (top.k, top.length) == (3, 4)
    assert np.isnan(values[0]) and np.isfinite(values[1:]).all()
    assert tokens[0].tolist() == [0] * 3 and logprobs[0].tolist() == [-99999.0] * 3
    assert tokens[1:, 0].tolist() == PROMPT[1:] and np.array_equal(logprobs[1:, 0], values[1:])
    assert (np.diff(logprobs[1:]) < 0).all()
    last = await sampler.answer(prompt_logprobs=True, prompt_logprobs_last=1, topk=3)
    assert np.isnan(np.frombuffer(last.prompt_logprobs, "<f4")).tolist() == [True, True, True, False]
    assert np.frombuffer(last.topk_prompt_logprobs.logprobs, "<f4")[:9].tolist() == [-99999.0] * 9


async def test_a_prompt_that_cannot_be_continued_is_refused(sampler: Sampler) -> None:
    for prompt in ([1] * LONGEST, [], [10**6], [-1]):
        assert b'"category": "user"' in await sampler.ask(prompt=prompt)
    assert len((await sampler.tokens(prompt=[1] * (LONGEST - 2), max_tokens=None))[0]) == 2
