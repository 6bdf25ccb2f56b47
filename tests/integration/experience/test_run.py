import asyncio
import math

import numpy as np
import pytest
from redis.asyncio import Redis

from polyreme.errors import ConfigError, RunFailedError, StaleTermError, UnavailableError
from polyreme.experience.metric_records import GroupsPlanned, IterationTrained
from polyreme.experience.run import CURRENT, Run, RunState
from polyreme.experience.scripts import TransitionError
from support.configs import run_config


async def test_everything_given_can_be_read_elsewhere(redis: Redis, run: Run) -> None:
    other = await Run.attach(redis, run.run_id, 0)
    assert (await other.config()).groups_per_iteration == 4
    assert await other.model_files() == {"config.json": b"{}", "tokenizer.json": b"[]"}
    assert await other.state() == (RunState.STARTING, "")
    assert len(await other.model_fingerprint()) == 16


async def test_a_configuration_of_another_release_is_an_error(redis: Redis, run: Run) -> None:
    written = (await run.config()).model_dump_json()
    await redis.set(run.key("config"), written[:-1] + ',"warp":9}')
    with pytest.raises(ConfigError, match=r"unknown key warp.*same Polyreme version"):
        await run.config()


async def test_the_newest_run_is_found_without_an_id(redis: Redis, run: Run) -> None:
    await redis.set(CURRENT, run.run_id)
    assert (await Run.attach(redis, None, 0)).run_id == run.run_id


async def test_a_server_of_the_newest_run_leaves_it_when_it_is_over(redis: Redis, run: Run, tmp_path) -> None:
    over = asyncio.Event()
    async with run.set_when_over(over, 0.02):
        await asyncio.sleep(0.1)  # for some looks
        assert not over.is_set()
        await run.set_state(RunState.DONE)
        await asyncio.wait_for(over.wait(), 300)
    with pytest.raises(UnavailableError, match="a run in Redis"):
        await Run.attach(redis, None, 0, ended=False)
    assert (await Run.attach(redis, run.run_id, 0, ended=False)).run_id == run.run_id
    waiting = asyncio.create_task(Run.attach(redis, None, 300, ended=False))
    await asyncio.sleep(0.05)
    await Run.resume(redis, run.run_id, run_config(tmp_path), {})
    resumed = await waiting
    superseded = asyncio.Event()
    async with resumed.set_when_over(superseded):
        await Run.create(redis, f"{run.run_id}-2", run_config(tmp_path), {})
        await asyncio.wait_for(superseded.wait(), 300)


async def test_attaching_waits_and_then_fails(redis: Redis, run_id: str, tmp_path) -> None:
    waiting = asyncio.create_task(Run.attach(redis, run_id, 300))
    await asyncio.sleep(0.05)
    await Run.create(redis, run_id, run_config(tmp_path), {})
    assert (await waiting).run_id == run_id
    with pytest.raises(UnavailableError, match=r"run nowhere"):
        await Run.attach(redis, "nowhere", 0)
    with pytest.raises(UnavailableError, match="run nowhere"):
        await Run(redis, "nowhere").state()


async def test_a_run_is_made_once_and_resumed_with_new_limits(redis: Redis, run: Run, tmp_path) -> None:
    with pytest.raises(ConfigError, match="--resume"):
        await Run.create(redis, run.run_id, run_config(tmp_path), {})
    await run.set_state(RunState.FAILED, "out of luck")
    resumed = await Run.resume(redis, run.run_id, run_config(tmp_path, iterations=7), {"config.json": b"new"})
    assert await resumed.state() == (RunState.STARTING, "")
    assert (await resumed.config()).iterations == 7
    assert await resumed.model_files() == {"config.json": b"new"}
    assert await redis.hget(run.key("meta"), "iterations") == b"7"
    with pytest.raises(UnavailableError, match="no record"):
        await Run.resume(redis, "nowhere", run_config(tmp_path), {})


S = RunState
LEGAL = {
    S.STARTING: {S.RUNNING, S.DRAINING, S.DONE, S.FAILED},
    S.RUNNING: {S.DRAINING, S.DONE, S.FAILED},
    S.DRAINING: {S.DONE, S.STOPPED, S.FAILED},
    S.DONE: set(),
    S.STOPPED: set(),
    S.FAILED: set(),
}
PATHS = {
    S.STARTING: [],
    S.RUNNING: [S.RUNNING],
    S.DRAINING: [S.DRAINING],
    S.DONE: [S.DONE],
    S.STOPPED: [S.DRAINING, S.STOPPED],
    S.FAILED: [S.FAILED],
}


@pytest.mark.parametrize("before", S)
@pytest.mark.parametrize("after", S)
async def test_states_follow_the_table(run: Run, before: RunState, after: RunState) -> None:
    for step in PATHS[before]:
        await run.set_state(step, "first")
    if after is before or after in LEGAL[before]:
        await run.set_state(after, "second")
        assert (await run.state())[0] is after
    else:
        with pytest.raises(TransitionError, match=f"the run is {before} and cannot become {after}"):
            await run.set_state(after)
        assert (await run.state())[0] is before


async def test_the_state_of_a_resumed_run_is_not_its_former_start_s_to_set(redis: Redis, run: Run, tmp_path) -> None:
    child = await Run.attach(redis, run.run_id, 0, start=run.start)
    successor = await Run.resume(redis, run.run_id, run_config(tmp_path), {})
    await (await Run.attach(redis, run.run_id, 0)).set_state(RunState.RUNNING)
    for former in (run, child):
        for state in (RunState.RUNNING, RunState.DRAINING, RunState.DONE, RunState.FAILED):
            with pytest.raises(StaleTermError, match="started again: start 2, not 1"):
                await former.set_state(state, "taken over")
    assert await successor.state() == (RunState.RUNNING, "")
    with pytest.raises(StaleTermError, match="found start 2"):
        await Run.attach(redis, run.run_id, 0, start=run.start)


async def test_a_resume_that_is_sent_again_is_one_start(redis: Redis, run: Run) -> None:
    words = ["the nonce", "{}", 0]
    keys = [run.key("config"), run.key("files")]
    assert await run.scripts.call("resume", *words, keys=keys) == 2
    assert await run.scripts.call("resume", *words, keys=keys) == 2


async def test_a_failed_run_raises_its_reason(run: Run) -> None:
    assert await run.check() is RunState.STARTING
    await run.set_state(RunState.FAILED, "no replica is left")
    with pytest.raises(RunFailedError, match="no replica is left"):
        await run.check()


async def test_records_come_in_order_and_as_plain_json(run: Run) -> None:
    for number in range(5):
        await run.emit(IterationTrained(iteration=number, metrics={"loss": np.float32(0.5), "lengths": np.arange(2)}))
    await run.emit(GroupsPlanned(iteration=5, metrics={"value": math.nan, "nested": {"inf": [math.inf, 1]}}))
    records = await run.records("0", 0)
    assert [record["iteration"] for _, record in records[:5]] == [0, 1, 2, 3, 4]
    assert records[0][1] == {"kind": "iteration", "iteration": 0, "alarms": [], "loss": 0.5, "lengths": [0, 1]}
    assert records[5][1] == {"kind": "rollout", "iteration": 5, "value": None, "nested": {"inf": [None, 1]}}
    assert await run.records(records[3][0], 0) == records[4:]
    assert await run.records(records[5][0], 0) == []


async def test_signals_wake_and_are_bounded(run: Run) -> None:
    after = await run.last_event()
    watching = asyncio.create_task(run.watch(after, 60_000))
    await asyncio.sleep(0.05)
    await run.set_state(RunState.RUNNING)
    last, signals = await watching
    assert signals == [("state", "running")]
    assert await run.watch(last, 20) == (last, [])
    for turn in range(15):
        await asyncio.gather(*(run.scripts.call("take", "learner", f"{turn}-{number}") for number in range(100)))
    assert await run.last_event() != last
    assert await run.redis.xlen(run.key("events")) < 1200


async def test_a_record_wakes_nobody(run: Run) -> None:
    before = await run.last_event()
    await run.emit(IterationTrained(iteration=1))
    assert len(await run.records("0", 0)) == 1 and await run.last_event() == before


async def test_records_that_are_on_disk_are_trimmed(run: Run) -> None:
    for number in range(5):
        await run.emit(IterationTrained(iteration=number))
    ids = [at for at, _ in await run.records("0", 0)]
    await run.trim_records("0")
    assert len(await run.records("0", 0)) == 5
    await run.trim_records(ids[3])
    assert [record["iteration"] for _, record in await run.records("0", 0)] == [3, 4]
    assert [record["iteration"] for _, record in await run.records(ids[3], 0)] == [4]


async def test_it_is_known_which_samples_are_on_disk(run: Run) -> None:
    assert await run.recorded() == -1
    await run.set_recorded(7)
    assert await run.recorded() == 7


async def test_a_long_wait_is_not_taken_for_a_dead_server(run: Run) -> None:
    start = asyncio.get_running_loop().time()
    assert await run.until(_never, within=0.3) is None
    assert asyncio.get_running_loop().time() - start > 0.25


async def _never() -> None:
    return None
