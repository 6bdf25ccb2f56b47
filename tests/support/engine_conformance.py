"""The checks that every inference engine passes. Run as a program: starts one engine and prints a line {check: null or traceback} after each.

python -m support.engine_conformance ENGINE MODEL_FILES VLLM [WEIGHTS]

VLLM: the section rollout.vllm as JSON. WEIGHTS: a Hugging Face directory; none: one tensor named `weight`, and no model.
"""

import asyncio
import itertools
import json
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]
from safetensors.numpy import load_file, save_file

from polyreme.weights.arena import Arena
from polyreme.weights.manifest import ArenaSource, Manifest, TensorSpec, plan_manifest
from polyreme_rollout.engine.load import load_engine
from polyreme_rollout.engine.protocol import (
    CHUNK_TOKENS,
    EngineRequest,
    InferenceEngine,
    LoadError,
    NewTokens,
    Sampling,
    ServedAdapter,
    ServesAdapters,
)
from support.replicas import Learner, hf_weights, rollout_config

PROMPT = (5, 6, 7, 8, 9)
CONTEXT, MAX_NUM_SEQS = 128, 4
DEADLINE = 120.0
MORE = 12
"""Adapters, more than an engine keeps that has room for two."""
GREEDY, RANDOM = Sampling(0.0, 1.0, -1, ()), Sampling(1.0, 1.0, -1, ())


@dataclass
class Answer:
    ids: list[int]
    logprobs: list[float]
    finish: str | None


class Subject:
    """An open engine, and versions to load into it. `salt` changes with every load, as in the service."""

    def __init__(self, engine: InferenceEngine, learner: Learner, arrays: dict[str, np.ndarray], vocab_size: int) -> None:
        self.engine, self.learner, self.arrays, self.vocab_size = engine, learner, arrays, vocab_size
        self.loads = 0
        self._requests = 0

    @property
    def salt(self) -> str:
        return f"load-{self.loads}"

    def write(self, factor: float, arrays: Mapping[str, np.ndarray] | None = None) -> ArenaSource:
        """Writes a version whose tensors are the first ones, or the given ones, times `factor`."""
        arrays = {name: array * np.float32(factor) for name, array in (arrays or self.arrays).items()}
        staged = self.learner.write(self.loads, arrays)
        manifest = Manifest.from_proto(staged.manifest)
        return ArenaSource(staged.arena_path, self.learner.arena.nonce, staged.slot, staged.generation, manifest)

    async def swap(self, factor: float, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        await self.engine.load([self.write(factor, arrays)])
        self.loads += 1
        await self.engine.resume()

    def request(self, max_new: int, sampling: Sampling = GREEDY, seed: int = 0, prefix: tuple[int, ...] = ()) -> EngineRequest:
        self._requests += 1
        return EngineRequest(f"check.{self._requests}", [*PROMPT, *prefix], max_new, seed, self.salt, sampling)

    async def answer(self, request: EngineRequest) -> Answer:
        answer = Answer([], [], None)
        async for delta in self.engine.generate(request):
            assert answer.finish is None, "tokens after the end"
            assert len(delta.token_ids) == len(delta.logprobs)
            answer.ids += delta.token_ids
            answer.logprobs += delta.logprobs
            answer.finish = delta.finish
        return answer


async def describes_itself(subject: Subject) -> None:
    engine = subject.engine
    assert engine.name
    assert (engine.max_model_len, engine.vocab_size) == (CONTEXT, subject.vocab_size)
    assert engine.weight_names == frozenset(subject.arrays)
    assert not engine.dead


async def greedy_answers_repeat_and_have_exact_lengths(subject: Subject) -> None:
    for length in (1, CHUNK_TOKENS, CHUNK_TOKENS + 1, CONTEXT - len(PROMPT)):
        first, again = [await subject.answer(subject.request(length)) for _ in range(2)]
        assert first.ids == again.ids
        assert len(first.ids) == length
        assert first.finish == "length"
        assert all(0 <= id < subject.vocab_size for id in first.ids)
        assert all(value <= 0 for value in first.logprobs)


async def a_prefix_is_continued(subject: Subject) -> None:
    whole = await subject.answer(subject.request(40))
    rest = await subject.answer(subject.request(23, prefix=tuple(whole.ids[:17])))
    assert rest.ids == whole.ids[17:]


async def a_stop_id_ends_a_request_and_is_its_last_token(subject: Subject) -> None:
    whole = await subject.answer(subject.request(40))
    stop = whole.ids[20]
    stopped = await subject.answer(subject.request(40, Sampling(0.0, 1.0, -1, (stop,))))
    assert stopped.ids == whole.ids[: whole.ids.index(stop) + 1]
    assert stopped.finish == "stop"


async def a_seed_repeats_a_sample_and_seeds_differ(subject: Subject) -> None:
    one, again, other = await asyncio.gather(*(subject.answer(subject.request(48, RANDOM, seed)) for seed in (11, 11, 2**63 - 1)))
    assert one.ids == again.ids
    assert one.ids != other.ids


async def a_seed_repeats_a_sample_among_others_with_long_prompts(subject: Subject) -> None:
    prefixes = [tuple((seed + place) % 40 + 3 for place in range(60)) for seed in range(MAX_NUM_SEQS)]
    alone = [await subject.answer(subject.request(32, RANDOM, 5, prefix)) for prefix in prefixes]
    await subject.swap(1.0)  # the engine has cached nothing
    together = await asyncio.gather(*(subject.answer(subject.request(32, RANDOM, 5, prefix)) for prefix in prefixes))
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert np.allclose([answer.logprobs for answer in together], [answer.logprobs for answer in alone], atol=1e-4)


async def closing_the_iterator_frees_its_place(subject: Subject) -> None:
    async def begin_and_close() -> None:
        stream = subject.engine.generate(subject.request(100, RANDOM))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    for _ in range(3):
        await asyncio.gather(*(begin_and_close() for _ in range(MAX_NUM_SEQS)))
    assert len((await subject.answer(subject.request(20))).ids) == 20


async def nothing_is_sampled_while_paused(subject: Subject) -> None:
    await counts_stay_after(subject, pauses=True)


async def a_load_pauses(subject: Subject) -> None:
    await counts_stay_after(subject, pauses=False)


async def counts_stay_after(subject: Subject, *, pauses: bool) -> None:
    """Loads twice during a request, if `pauses` after a pause, and compares the numbers of tokens."""
    for _ in range(20):
        request = subject.request(CONTEXT - len(PROMPT))
        stream = subject.engine.generate(request)
        received = len((await anext(stream)).token_ids)
        if pauses:
            await subject.engine.pause()
        first, second = [(await subject.engine.load([subject.write(1.0)])).sampled.get(request.request_id) for _ in range(2)]
        subject.loads += 2
        await subject.engine.resume()
        total = received + sum([len(delta.token_ids) async for delta in stream])
        assert total == request.max_new
        if second is not None:  # it was still running
            assert first == second
            assert received <= second <= total
            return
    raise AssertionError("every request had ended before the pause")


async def sleep_keeps_running_requests(subject: Subject) -> None:
    """Sampling continues with the old weights, and with new ones that are loaded before."""
    request = subject.request(100)
    undisturbed = await subject.answer(subject.request(100))
    for factor in (None, 2.0):
        stream = subject.engine.generate(request)
        first = await anext(stream)
        await subject.engine.pause()
        await subject.engine.sleep()
        await subject.engine.wake()
        if factor is not None:
            await subject.engine.load([subject.write(factor)])
            subject.loads += 1
        await subject.engine.resume()
        ids = [*first.token_ids, *[id async for delta in stream for id in delta.token_ids]]
        assert len(ids) == 100
        assert factor is not None or ids == undisturbed.ids
        request = subject.request(100)
    await subject.swap(1.0)


async def a_sleeping_engine_computes_nothing(subject: Subject) -> None:
    """Its processes use no processor time, with running and waiting requests."""
    tasks = [asyncio.create_task(subject.answer(subject.request(100))) for _ in range(2 * MAX_NUM_SEQS)]
    await asyncio.sleep(0)
    await subject.engine.pause()
    await subject.engine.sleep()
    async with asyncio.timeout(DEADLINE):
        while await busy_fraction(0.5) > 0.2:  # vLLM's workers poll for messages for up to a second after the last one
            pass
    await subject.engine.wake()
    await subject.engine.resume()
    assert all(len(answer.ids) == 100 for answer in await asyncio.gather(*tasks))


async def busy_fraction(seconds: float) -> float:
    """Processor time of this process and its descendants, per second."""

    def spent() -> float:
        total = 0.0
        for process in (me, *me.children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system
        return total

    me = psutil.Process()
    before, began = spent(), time.monotonic()
    await asyncio.sleep(seconds)
    return (spent() - before) / (time.monotonic() - began)


async def a_version_decides_the_answers(subject: Subject) -> None:
    answers, digests = [], []
    for factor in (1.0, 1.5, 1.0):
        await subject.swap(factor)
        answers.append((await subject.answer(subject.request(60, RANDOM, 7))).ids)
        digests.append(await subject.engine.weight_digests())
    assert answers[0] == answers[2] != answers[1]
    assert digests[0] == digests[2] != digests[1]
    for before, after in zip(digests[0], digests[1], strict=True):
        assert {name: found.shape for name, found in before.items()} == {name: found.shape for name, found in after.items()}


async def given_tokens_have_the_log_probabilities_of_the_version(subject: Subject) -> None:
    ids, found = [*PROMPT, 3, 2, 1], []
    for factor in (1.0, 1.5, 1.0):
        await subject.swap(factor)
        found.append([await subject.engine.logprobs(ids[:length], subject.salt) for length in (len(ids), len(ids) - 2)])
    assert [len(values) for values in found[0]] == [len(ids) - 1, len(ids) - 3]
    assert all(value <= 0 for value in found[0][0])
    assert np.allclose(found[0][0][:-2], found[0][1], atol=1e-4)
    assert np.allclose(found[0][0], found[2][0], atol=1e-6)
    assert not np.allclose(found[0][0], found[1][0], atol=1e-3)
    for token, value, top in zip(ids[1:], found[2][0], await subject.engine.top_logprobs(ids, 3, subject.salt), strict=True):
        assert len(top) == 3 and [each for _, each in top] == sorted((each for _, each in top), reverse=True)
        assert top[0][1] >= value - 1e-4
        assert np.isclose(dict(top).get(token, value), value, atol=1e-4)


async def given_tokens_wait_for_no_sample(subject: Subject) -> None:
    """With all slots taken and more requests waiting, the answer comes before the first request ends, and changes no token of any."""
    length, seeds = CONTEXT - len(PROMPT), range(2 * MAX_NUM_SEQS)
    expected = [(await subject.answer(subject.request(length, RANDOM, seed))).ids for seed in seeds]
    alone = await subject.engine.logprobs(PROMPT, f"{subject.salt}-scored")
    for _ in range(20):
        streams = [subject.engine.generate(subject.request(length, RANDOM, seed)) for seed in seeds]
        first = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.gather(*first[:MAX_NUM_SEQS])
        rest = [asyncio.create_task(_rest(head, stream)) for head, stream in zip(first, streams, strict=True)]
        found = await subject.engine.logprobs(PROMPT, f"{subject.salt}-scored")
        ended = sum(task.done() for task in rest)
        assert [await task for task in rest] == expected
        assert np.allclose(found, alone, atol=1e-4)
        if not ended:
            return
    raise AssertionError("each time, a request ended before the answer")


async def _rest(head: "asyncio.Future[NewTokens]", stream: AsyncIterator[NewTokens]) -> list[int]:
    """All tokens of a request whose first ones arrive with `head`."""
    return [*(await head).token_ids, *[id async for delta in stream for id in delta.token_ids]]


async def sampled_tokens_have_the_log_probabilities_of_the_model(subject: Subject) -> None:
    """This holds for any way of finding the tokens. The simulated engine has no model."""
    if subject.engine.name == "simulated":
        return
    repeats = (5, 6, 7, 8, 9) * 6
    for factor in (1.0, 1.5):
        await subject.swap(factor)
        requests = [subject.request(60, RANDOM, seed, prefix=repeats) for seed in range(MAX_NUM_SEQS)]
        for answer in await asyncio.gather(*(subject.answer(request) for request in requests)):
            given = await subject.engine.logprobs([*PROMPT, *repeats, *answer.ids], f"{subject.salt}-scored")
            assert np.allclose(given[-60:], answer.logprobs, atol=1e-4)


async def a_request_has_the_adapter_that_it_names(subject: Subject) -> None:
    """Two of several ranks in one batch, and none beside one: the tokens' log-probabilities are those of merged weights, also when the engine has
    to read an adapter's files again."""
    engine = subject.engine
    if not isinstance(engine, ServesAdapters) or not engine.max_loras:
        return
    ids, merged = [*PROMPT, 3, 2, 1], dict[ServedAdapter | None, Sequence[float]]()
    with tempfile.TemporaryDirectory() as folder:
        adapters = [random_adapter(Path(folder) / str(rank), subject.arrays, rank) for rank in (2, 8, 3)]
        for each in adapters:
            await subject.swap(1.0, merged_arrays(subject.arrays, each.folder))
            merged[each] = await engine.logprobs(ids, subject.salt)
        await subject.swap(1.0)
        merged[None] = await engine.logprobs(ids, subject.salt)
        assert all(not np.allclose(one, other, atol=1e-3) for one, other in itertools.combinations(merged.values(), 2))
        for pair in itertools.product([*adapters, None], repeat=2):
            for adapter in pair:
                if adapter is not None:
                    await engine.load_adapter(adapter)
            asked = [replace(subject.request(40, RANDOM, seed), adapter=pair[seed % 2]) for seed in range(MAX_NUM_SEQS)]
            for request, answer in zip(asked, await asyncio.gather(*map(subject.answer, asked)), strict=True):
                whole, salt = [*PROMPT, *answer.ids], f"{subject.salt}-scored"
                assert np.allclose((await engine.logprobs(whole, salt, request.adapter))[-40:], answer.logprobs, atol=1e-4)
        for number in range(MORE):  # the engine drops the first ones
            await engine.load_adapter(random_adapter(Path(folder) / f"more-{number}", subject.arrays, 2))
        for adapter, expected in merged.items():
            assert np.allclose(await engine.logprobs(ids, f"{subject.salt}-scored", adapter), expected, atol=1e-4)
            [*_, last] = await engine.top_logprobs(ids, 2, f"{subject.salt}-scored", adapter)
            assert np.isclose(dict(last).get(ids[-1], expected[-1]), expected[-1], atol=1e-4)


def random_adapter(folder: Path, arrays: Mapping[str, np.ndarray], rank: int) -> ServedAdapter:
    """Writes an adapter of some linear layers in PEFT's format, its factor 2."""
    rng, pairs = np.random.default_rng(rank), dict[str, np.ndarray]()
    for name, array in arrays.items():
        layer = name.removesuffix(".weight")
        if layer.endswith(("q_proj", "o_proj", "up_proj", "down_proj") if rank == 3 else "_proj"):
            shapes = {"A": (rank, array.shape[1]), "B": (array.shape[0], rank)}
            pairs |= {
                f"base_model.model.{layer}.lora_{key}.weight": rng.normal(0, 0.1, shapes[key]).astype("f4") for key in shapes
            }
    folder.mkdir()
    save_file(pairs, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return ServedAdapter.newest(folder)


def merged_arrays(arrays: Mapping[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    pairs, found = load_file(folder / "adapter_model.safetensors"), dict(arrays)
    for name, a in pairs.items():
        if "lora_A" in name:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            found[f"{layer}.weight"] = found[f"{layer}.weight"] + 2 * pairs[name.replace("lora_A", "lora_B")] @ a
    return found


async def a_failed_load_is_an_error_and_the_next_one_works(subject: Subject) -> None:
    await subject.swap(1.0)
    before = await subject.engine.weight_digests()
    stale = subject.write(2.0)
    subject.learner.arena.begin(stale.slot)
    await subject.engine.pause()
    try:
        await subject.engine.load([stale])
    except LoadError as error:
        assert str(error)
    else:
        raise AssertionError("a slot that is being written was loaded")
    await subject.engine.load([subject.write(1.0)])
    subject.loads += 1
    await subject.engine.resume()
    assert await subject.engine.weight_digests() == before


async def v1_serves_the_model_under_the_salt(subject: Subject) -> None:
    salted = 0

    async def salt() -> str:
        nonlocal salted
        salted += 1
        return subject.salt

    transport = httpx.ASGITransport(await subject.engine.openai_app("policy", salt))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=DEADLINE) as client:
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["policy"]
        body = {"model": "policy", "prompt": list(PROMPT), "max_tokens": 4, "temperature": 0}
        completion = await client.post("/v1/completions", json=body)
        assert completion.status_code == 200, completion.text
        assert completion.json()["usage"]["completion_tokens"] == 4
    assert salted == 1


CHECKS: dict[str, Callable[[Subject], Awaitable[None]]] = {
    check.__name__: check
    for check in (
        describes_itself,
        greedy_answers_repeat_and_have_exact_lengths,
        a_prefix_is_continued,
        a_stop_id_ends_a_request_and_is_its_last_token,
        a_seed_repeats_a_sample_and_seeds_differ,
        a_seed_repeats_a_sample_among_others_with_long_prompts,
        closing_the_iterator_frees_its_place,
        nothing_is_sampled_while_paused,
        a_load_pauses,
        sleep_keeps_running_requests,
        a_sleeping_engine_computes_nothing,
        a_version_decides_the_answers,
        given_tokens_have_the_log_probabilities_of_the_version,
        given_tokens_wait_for_no_sample,
        sampled_tokens_have_the_log_probabilities_of_the_model,
        a_request_has_the_adapter_that_it_names,
        a_failed_load_is_an_error_and_the_next_one_works,
        v1_serves_the_model_under_the_salt,
    )
}
CLOSES = "closing_twice_leaves_a_dead_engine"


async def run_checks(subject: Subject) -> None:
    await subject.engine.open()
    await subject.swap(1.0)
    for name, check in CHECKS.items():
        try:
            await asyncio.wait_for(check(subject), DEADLINE)
            report(name, None)
        except Exception:  # noqa: BLE001 - is the check's result
            report(name, traceback.format_exc())


def report(check: str, problem: str | None) -> None:
    print(json.dumps({check: problem}), flush=True)


def main() -> None:
    name, files, options, *weights = sys.argv[1:]
    run_id, vocab_size = f"test-{uuid.uuid4().hex[:12]}", json.loads((Path(files) / "config.json").read_text())["vocab_size"]
    if weights:
        arrays, learner = hf_weights(Path(weights[0])), Learner.of(run_id, Path(weights[0]))
    else:
        arrays, layout = {"weight": np.arange(64, dtype="<f4")}, plan_manifest([TensorSpec("weight", "F32", (64,))])
        learner = Learner(run_id, layout, Arena.create(run_id, layout.nbytes))
    vllm = {"kv_cache_mib": 64, **json.loads(options)}
    config = rollout_config(Path(files), engine=name, max_model_len=CONTEXT, max_num_seqs=MAX_NUM_SEQS, vllm=vllm)
    engine = load_engine(config.rollout.engine)(config, Path(files))
    try:
        asyncio.run(run_checks(Subject(engine, learner, arrays, vocab_size)))
    finally:
        engine.close()
        learner.arena.close()
    engine.close()
    report(CLOSES, None if engine.dead else "the engine is not dead after close()")


if __name__ == "__main__":
    main()
