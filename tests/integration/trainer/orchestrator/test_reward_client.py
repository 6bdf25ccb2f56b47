"""Scores from the real reward service: failures are retried, are distinguished from outages, and never become numbers."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from polyreme import API_VERSION
from polyreme.api.v1 import reward_pb2
from polyreme.errors import UnavailableError
from polyreme.experience.leases import Lease, Registry
from polyreme.process.backoff import Backoff
from polyreme_reward.server import serve
from polyreme_trainer.orchestrator.scoring.reward_client import RewardClient
from polyreme_trainer.orchestrator.scoring.score_call import Question, ScoreError, verdict_of
from support.proxy import bad_network
from support.rewards import spelled
from support.simulated import ROWS, config_tree, make_run
from support.waiting import until

PLUGIN = """
import json, pathlib, time

def reward(response, metadata, **rest):
    mode = metadata.get("mode")
    if mode == "raise" or (mode == "flaky" and bump(metadata["marks"]) < 2):
        raise ValueError("no score today")
    if mode == "hang":
        time.sleep(3600)
    if mode == "slow":
        bump(metadata["marks"])
        while not pathlib.Path(metadata["until"]).exists():
            time.sleep(0.01)
    return float("nan") if mode == "nan" else float(response)

def bump(path):
    with open(path, "a") as marks:
        marks.write("x")
    return len(pathlib.Path(path).read_text())
"""


def question(i, value="1", mode=None, **metadata) -> Question:
    return Question(("run", 0, 1, i), "p", value, value, "", json.dumps({"mode": mode, **metadata}))


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@pytest.fixture
def start(redis, run_id, tmp_path):
    """Makes a run whose reward is PLUGIN, with changes to its reward section."""

    async def start(**changes):
        (tmp_path / "plugin.py").write_text(PLUGIN)
        section = {
            "rewards": [{"file": str(tmp_path / "plugin.py")}],
            "item_timeout": 60.0,
            "attempts": 2,
            "start_timeout": 600.0,
        }
        run = await make_run(redis, run_id, config_tree(tmp_path, ROWS, reward={**section, **changes}))
        return run, (await run.config()).reward

    return start


async def test_scores_parts_and_keys(start):
    run, config = await start(rewards=[{"name": "exact", "weight": 2.0}])
    async with serve(config, run=run):
        rewards = RewardClient(run, config, spelled)
        await rewards.refresh()
        questions = [Question(("run", 0, 1, i), "p", text, text, "7", "{}") for i, text in enumerate(["7", "8", "7"])]
        results = await rewards.score(questions)
        assert [result.score for result in results] == [2.0, 0.0, 2.0]
        assert [(part.name, part.raw, part.weighted) for part in results[0].parts] == [("exact", 1.0, 2.0)]
        again = await rewards.score([*questions[:1], Question(("run", 0, 2, 0), "p", "7", "7", "7", "{}")])
        assert again[0].key == results[0].key != again[1].key
        assert len({result.key for result in results}) == 3
        await rewards.close()


async def test_a_group_larger_than_a_message_takes_several_calls(start):
    run, config = await start(rewards=[{"name": "exact"}])
    async with serve(config, run=run):
        rewards = RewardClient(run, config, spelled)
        await rewards.refresh()
        column = json.dumps({"column": "x" * (9 << 20)})
        questions = [Question(("run", 0, 1, i), "p", text, text, "7", column) for i, text in enumerate("78777")]
        calls = [[] for _ in questions]
        results = await rewards.score(questions, calls)
        assert [result.score for result in results] == [1.0, 0.0, 1.0, 1.0, 1.0]
        assert [[call.status for call in each] for each in calls] == [["ok"]] * 5
        with pytest.raises(ScoreError, match="a larger one"):
            await rewards.score([Question(("run", 0, 1, 9), "p", "7", "7", "7", json.dumps({"column": "x" * (33 << 20)}))])
        await rewards.close()


PER_TOKEN = """
def reward(token_ids, token_texts):
    return [float(text == "7") for text in token_texts]
"""


@pytest.mark.parametrize(("source", "expected"), [("steps", [1.0, 0.0]), ("length", [])])
async def test_tokens_go_to_rewards_that_read_them_and_their_numbers_come_back(start, tmp_path, source, expected):
    (tmp_path / "steps.py").write_text(PER_TOKEN)
    run, config = await start(rewards=[{"file": str(tmp_path / "steps.py")} if source == "steps" else {"name": source}])
    asked: list[tuple[int, ...]] = []

    def texts(ids):
        asked.append(tuple(ids))
        return spelled(ids)

    async with serve(config, run=run):
        rewards = RewardClient(run, config, texts)
        await rewards.refresh()
        (result,) = await rewards.score([Question(("run", 0, 1, 0), "p", "78", "78", "", "{}", token_ids=(55, 56))])
        assert (result.score, list(result.token_rewards)) == (1.0, expected)
        assert asked == ([(55, 56)] if expected else [])
        await rewards.close()


async def test_what_fails_at_first_is_retried(start, tmp_path):
    run, config = await start()
    async with serve(config, run=run):
        rewards = RewardClient(run, config, spelled)
        await rewards.refresh()
        questions = [question(0, "3"), question(1, "4", "flaky", marks=str(tmp_path / "marks"))]
        assert [result.score for result in await rewards.score(questions)] == [3.0, 4.0]
        assert (tmp_path / "marks").read_text() == "xx"
        await rewards.close()


async def test_a_failure_is_never_a_number_and_one_bad_group_is_no_outage(start):
    run, config = await start()
    async with serve(config, run=run):
        rewards = RewardClient(run, config, spelled)
        await rewards.refresh()
        for mode, why in (("raise", "no score today"), ("nan", "finite")):
            with pytest.raises(ScoreError, match=f"(?s)1 of 2 samples have no score after 2 attempts: .*{why}"):
                await rewards.score([question(mode + "0", "3"), question(mode + "1", "4", mode)])
            assert not rewards.paused
        with pytest.raises(ScoreError, match=r"2 of 2 samples .*2 attempts"):
            await rewards.score([question(i, mode="raise") for i in range(2)])
        assert not rewards.paused
        await rewards.close()


async def test_a_hang_is_a_failure(start):
    run, config = await start(item_timeout=0.5)
    async with serve(config, run=run):
        rewards = RewardClient(run, config, spelled)
        await rewards.refresh()
        with pytest.raises(ScoreError, match=r"(?s)1 of 1 samples .*timeout"):
            await rewards.score([question(0, mode="hang")])
        assert not rewards.paused
        await rewards.close()


@pytest.mark.parametrize(("mode", "final"), [("raise", True), ("nan", True), ("hang", False)])
async def test_an_error_of_the_rewards_themselves_is_no_outage_before_anything_is_scored(start, mode, final):
    run, config = await start(attempts=1, start_timeout=1.0, item_timeout=2.0 if mode == "hang" else 60.0)
    async with serve(config.model_copy(update={"start_timeout": 600.0}), run=run):
        rewards = RewardClient(run, config.model_copy(update={"start_timeout": 1000.0 if final else 1.0}), spelled, proven=False)
        await rewards.refresh()
        verdicts = []
        for g in range(2):
            with pytest.raises(ScoreError) as caught:
                await rewards.score(
                    [Question(("run", g, 1, i), "p", str(i), str(i), "", f'{{"mode": "{mode}"}}') for i in range(2)]
                )
            verdicts.append(caught.value.verdict)
        assert len(set(verdicts)) == 1 and bool(verdicts[0]) is final
        assert not rewards.health.proven
        await rewards.close()


def test_a_verdict_is_one_reason_that_does_not_pass():
    def verdict(*results, remote=()):
        return verdict_of([reward_pb2.ScoreResult(status=status, message=message) for status, message in results], remote)

    error, timeout, ok = reward_pb2.SCORE_STATUS_ERROR, reward_pb2.SCORE_STATUS_TIMEOUT, reward_pb2.SCORE_STATUS_OK
    assert verdict((error, "mine: found 'a' in 3 s"), (error, "mine: found 'b' in 4.5 s")) == "mine: found _ in _ s"
    assert verdict((error, "mine: a"), (error, "mine: b")) == ""
    assert verdict((timeout, "mine: a")) == verdict((ok, "")) == ""
    assert verdict((error, "far: refused"), remote=("far: ",)) == ""
    assert verdict((error, "mine: refused"), remote=("far: ",)) == "mine: refused"


async def test_a_reward_that_always_raises_pauses_admission_for_the_grace(start):
    run, config = await start()
    async with serve(config, run=run):
        rewards = RewardClient(run, config, spelled)
        await rewards.refresh()
        groups = [asyncio.create_task(rewards.score([question(2 * g + i, mode="raise") for i in range(2)])) for g in range(2)]
        await until(lambda: rewards.paused and rewards.health.announced)
        assert not any(group.done() for group in groups)
        rewards.health.outage_timeout = 0.0  # it has passed
        for group in groups:
            with pytest.raises(ScoreError, match=r"2 of 2 samples .*no score today"):
                await group
        assert not rewards.paused
        notices = [record["text"] for _, record in await run.records("0", 0)]
        assert len(notices) == 1 and "no sample gets a score" in notices[0] and "no score today" in notices[0]
        assert (await rewards.score([question(9, "5")]))[0].score == 5.0
        assert rewards.health.down_since is None
        await rewards.close()


async def test_an_outage_is_over_when_a_server_is_there(start):
    run, config = await start(rewards=[{"name": "exact"}])
    rewards = RewardClient(run, config, spelled, backoff=Backoff(first=600.0, longest=600.0))
    scoring = asyncio.create_task(rewards.score([Question(("run", 0, 1, 0), "p", "7", "7", "7", "{}")]))
    await until(lambda: rewards.paused)
    async with serve(config, run=run):
        await rewards.refresh()
        async with asyncio.timeout(250):  # and not after the pause between two tries
            assert [result.score for result in await scoring] == [1.0]
        assert not rewards.paused
    await rewards.close()


async def test_a_server_that_goes_and_comes_back(start):
    run, config = await start(rewards=[{"name": "exact"}])
    rewards, asked = RewardClient(run, config, spelled), Question(("run", 0, 1, 0), "p", "7", "7", "7", "{}")
    async with serve(config, run=run):
        await rewards.refresh()
        await rewards.score([asked])
    scoring = asyncio.create_task(rewards.score([asked]))  # the lease is gone, and the client does not know yet
    await until(lambda: rewards.health.down_since is not None)
    async with serve(config, run=run):
        await rewards.refresh()
        assert (await scoring)[0].score == 1.0
    await rewards.close()


@pytest.mark.parametrize("another", [False, True], ids=["alone", "beside another"])
async def test_a_server_that_drains_still_brings_what_it_was_asked(start, tmp_path, another):
    run, config = await start()
    marks, scored = tmp_path / "marks", tmp_path / "scored"
    marks.touch()
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        await first.enter_async_context(serve(config, run=run))
        rewards = RewardClient(run, config, spelled)
        await rewards.refresh()
        scoring = asyncio.create_task(rewards.score([question(0, "3", "slow", marks=str(marks), until=str(scored))]))
        await until(lambda: marks.read_text() != "")
        if another:
            await second.enter_async_context(serve(config, run=run))
        draining = asyncio.create_task(first.aclose())
        while len(await Registry(run).leases("reward")) > another:  # noqa: ASYNC110 (a lease is polled for)
            await asyncio.sleep(0.01)
        await rewards.refresh()
        assert not scoring.done(), "reading the leases does not wait for the answer"
        scored.touch()
        assert [result.score for result in await scoring] == [3.0]
        assert marks.read_text() == "x" and rewards.health.down_since is None
        await draining
        await rewards.close()


@pytest.mark.parametrize("late", [False, True], ids=["at another", "when it is back"])
async def test_what_a_server_that_left_never_answers_is_asked_again(start, late):
    """The server is stopped for longer than its lease, so its call ends only with the channel."""
    run, config = await start(rewards=[{"name": "exact"}])
    asked = Question(("run", 0, 1, 0), "p", "7", "7", "7", "{}")
    async with serve(config) as addresses, bad_network(*split(addresses.grpc)) as way, AsyncExitStack() as others:
        lease = Lease("reward", "a", f"127.0.0.1:{way.port}", "", API_VERSION)
        rewards = RewardClient(run, config.model_copy(update={"item_timeout": 0.2}), spelled)
        async with await Registry(run).register(lease):
            await rewards.refresh()
            await rewards.score([asked])
            way.hold()
            scoring = asyncio.create_task(rewards.score([asked]))
            await until(lambda: any(server.outstanding for server in rewards._servers.values()))
        if not late:
            await others.enter_async_context(serve(config, run=run))
        await rewards.refresh()
        assert not scoring.done(), "it may still answer"
        if late:
            await until(lambda: not rewards._leaving)
            way.heal()
            await others.enter_async_context(await Registry(run).register(lease))
            await rewards.refresh()
        async with asyncio.timeout(300):
            assert (await scoring)[0].score == 1.0
        await rewards.close()


async def test_closing_does_not_wait_for_a_server_that_left(start):
    run, config = await start(rewards=[{"name": "exact"}], item_timeout=60.0)
    asked = Question(("run", 0, 1, 0), "p", "7", "7", "7", "{}")
    async with serve(config) as addresses, bad_network(*split(addresses.grpc)) as way:
        rewards = RewardClient(run, config, spelled)
        rewards._grace = 3600.0
        async with await Registry(run).register(Lease("reward", "a", f"127.0.0.1:{way.port}", "", API_VERSION)):
            await rewards.refresh()
        way.hold()
        scoring = asyncio.create_task(rewards.score([asked]))
        await until(lambda: any(server.outstanding for server in rewards._servers.values()))
        await rewards.refresh()
        scoring.cancel()  # by the caller, so it is not retried
        with pytest.raises(asyncio.CancelledError):
            await scoring
        async with asyncio.timeout(300):
            await rewards.close()


async def test_no_server_for_too_long(start):
    run, config = await start(start_timeout=0.6)
    rewards = RewardClient(run, config, spelled)
    with pytest.raises(UnavailableError, match=r"reward\.start_timeout = 1 s.*no reward server"):
        await rewards.score([question(0)])


async def test_a_full_server_is_asked_again_when_it_says(start):
    run, config = await start(queue=2)
    async with serve(config, run=run):
        rewards = RewardClient(run, config, spelled)
        await rewards.refresh()
        groups = [[question(2 * g, "1"), question(2 * g + 1, "2")] for g in range(3)]
        results = await asyncio.gather(*(rewards.score(group) for group in groups))
        assert [[result.score for result in group] for group in results] == [[1.0, 2.0]] * 3
        await rewards.close()
