"""The teacher's client against servers that fail, hang, refuse and return: a failure is never a number."""

import asyncio
import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme.config.data import DataConfig
from polyreme.config.teacher import TeacherConfig
from polyreme.errors import ConfigError, UnavailableError
from polyreme.process.backoff import Backoff
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.scoring.teacher_client import TeacherClient, TeacherError
from support.raw_http import RawServer, raw_server, reply
from support.simulated import ROWS, config_tree, make_run
from support.tiny_tokenizer import model_files

COMPRESSED = "content-encoding: gzip\r\n"
MODELS = {"data": [{"id": "big", "max_model_len": 300}]}


@pytest.fixture
async def run(redis, run_id, tmp_path):
    return await make_run(redis, run_id, config_tree(tmp_path, ROWS))


def template() -> Template:
    return Template(model_files(), DataConfig(train=Path("unused")))


def answer(body: bytes, text: Callable[[int], str] = lambda each: template().decode([[each]], special=True)[0]) -> bytes:
    """A teacher's reply, in which the log-probability of each id is -id / 100."""
    if not body:
        return reply(json.dumps(MODELS).encode())
    ids = json.loads(body)["prompt"]
    rows = [{str(each): {"logprob": -each / 100, "decoded_token": text(each)}} for each in ids]
    return reply(json.dumps({"choices": [{"prompt_logprobs": [None, *rows[1:]]}]}).encode())


class Teacher:
    """Answers requests with `replies`, one each, then like a teacher; None: no answer."""

    def __init__(self, *replies: bytes | None) -> None:
        self.replies = list(replies)

    async def __call__(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        chosen = self.replies.pop(0) if self.replies else answer(body)
        if chosen is None:
            await asyncio.sleep(3600)
        writer.write(chosen or b"")


def client(run: Any, *servers: RawServer, **fields: Any) -> TeacherClient:
    urls = [f"{server.url}v1" for server in servers]
    config = TeacherConfig.model_validate({"url": urls, "outage_timeout": 600.0, **fields})
    return TeacherClient(run, config, Backoff(first=0.01, longest=0.05))


async def test_each_response_has_the_numbers_of_its_tokens(run) -> None:
    async with raw_server(Teacher()) as server:
        teacher = client(run, server)
        await teacher.check(template(), 299)
        found = await asyncio.gather(*(teacher.logprobs([1, 2], [3 + place, 4]) for place in range(20)))
        for place, numbers in enumerate(found):
            assert numbers.dtype == np.float32
            np.testing.assert_allclose(numbers, [-(3 + place) / 100, -0.04], rtol=1e-6)
        assert {json.loads(body)["model"] for body in server.bodies if body} == {"big"}
        await teacher.close()


@pytest.mark.parametrize(
    "bad", [reply(b"{}", "503 Busy"), reply(b"", "429 Slow", "retry-after: 0\r\n"), reply(b"", "500 Oh"), b""]
)
async def test_what_may_pass_is_repeated(run, bad: bytes) -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        if chosen := teacher_replies.pop(0) if teacher_replies else answer(body):
            writer.write(chosen)
        else:
            writer.close()

    teacher_replies = [bad, bad, bad, bad, bad, bad]
    async with raw_server(handler) as server:
        teacher = client(run, server, tries=1)  # nothing else succeeds, so this is an outage
        assert (await teacher.logprobs([1], [2])).tolist() == pytest.approx([-0.02])
        assert not teacher_replies
        await teacher.close()


@pytest.mark.parametrize(
    "bad",
    [
        reply(b'{"error": "too long"}', "400 Bad"),
        reply(b"no", "401 Who"),
        reply(b"<html>"),
        reply(b"[" * 100_000),
        reply(b'{"choices": [{"text": ""}]}'),
        reply(b'{"choices": [{"prompt_logprobs": [null, {"2": {"logprob": null}}]}]}'),
        reply(gzip.compress(b'{"choices": [{"prompt_logprobs": [null, {"2": {"logprob": -1}}]}]}'), headers=COMPRESSED),
    ],
)
async def test_a_refusal_fails_the_attempt_at_once(run, bad: bytes) -> None:
    async with raw_server(Teacher(bad)) as server:
        teacher = client(run, server)
        with pytest.raises(TeacherError, match="expected"):
            await teacher.logprobs([1], [2])
        assert len(server.bodies) == 1
        await teacher.close()


async def test_a_response_that_fails_while_others_are_answered_fails_its_attempt(run) -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b"", "500 Oh") if json.loads(body)["prompt"][1] == 7 else answer(body))

    async with raw_server(handler) as server:
        teacher, stop = client(run, server, tries=3), asyncio.Event()

        async def others() -> None:
            while not stop.is_set():
                await teacher.logprobs([1], [2])

        going = asyncio.create_task(others())
        with pytest.raises(TeacherError, match="failed"):
            await asyncio.wait_for(teacher.logprobs([1], [7]), 300)
        stop.set()
        await going
        await teacher.close()


async def test_silence_is_a_failed_request_and_the_other_server_answers(run) -> None:
    async def silent(body: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    async with raw_server(silent) as gone, raw_server(Teacher()) as there:
        teacher = client(run, gone, there, timeout=0.5, tries=1000)  # the other server may be slow as well
        found = await asyncio.gather(*(teacher.logprobs([1], [2]) for _ in range(6)))
        assert [numbers.tolist() for numbers in found] == [pytest.approx([-0.02])] * 6
        await teacher.close()


async def test_an_outage_is_announced_once_and_ends_the_run_in_the_end(run) -> None:
    async with raw_server(Teacher()) as server:
        pass  # its port is free again
    teacher = client(run, server, outage_timeout=1.0)
    begin = time.monotonic()
    failures = await asyncio.gather(*(teacher.logprobs([1], [2]) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(failure, UnavailableError) for failure in failures)
    assert time.monotonic() - begin >= 1.0
    notices = [fields for _, fields in await run.records("0", 1000) if fields.get("kind") == "notice"]
    assert len(notices) == 1 and "the teacher does not answer" in notices[0]["text"]
    await teacher.close()


async def test_another_vocabulary_is_refused(run) -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(body, lambda each: "x" if each == 12 else template().decode([[each]], special=True)[0]))

    async with raw_server(handler) as server:
        teacher = client(run, server)
        with pytest.raises(ConfigError) as caught:
            await teacher.check(template(), 299)
        assert "id 12" in caught.value.found
        await teacher.close()


@pytest.mark.parametrize(("fields", "longest", "found"), [({}, 300, "max_model_len"), ({"model": "small"}, 10, "small")])
async def test_a_model_that_is_not_there_or_too_small_is_refused(run, fields: Any, longest: int, found: str) -> None:
    async with raw_server(Teacher()) as server:
        teacher = client(run, server, **fields)
        with pytest.raises(ConfigError) as caught:
            await teacher.check(template(), longest)
        assert found in caught.value.found
        await teacher.close()


async def test_a_short_context_is_probed_in_parts(run) -> None:
    async with raw_server(Teacher()) as server:
        teacher = client(run, server)
        await teacher.check(template(), 8)
        assert max(len(json.loads(body)["prompt"]) for body in server.bodies if body) <= 8
        await teacher.close()
