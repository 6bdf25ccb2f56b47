"""The request log on a real Redis."""

import asyncio
import time

import pytest
from redis.asyncio import Redis

from polyreme.errors import StoreError
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.metric_records import StageStep
from polyreme.experience.open_requests import OpenRequests
from polyreme.experience.requests import TENANT_DIGITS, LogPlace, RequestLog, in_lane
from polyreme.experience.service_records import SampledGroup
from polyreme.experience.store import connect
from support.proxy import at_port, bad_network, port_of


@pytest.fixture
def log(redis: Redis, run_id: str) -> RequestLog:
    return RequestLog(redis, run_id)


async def test_a_repeated_request_is_executed_once(log: RequestLog) -> None:
    place = in_lane("m", 0)
    assert [await log.submit(place, b"a"), await log.submit(place, b"a")] == ["new", "known"]
    assert await log.open("learner") == [place]
    assert await log.payload(place) == b"a"
    assert await log.finish(place, b"first")
    assert not await log.finish(place, b"second")
    assert await log.submit(place, b"a") == "known"
    assert (await log.open("learner"), await log.result(place.id)) == ([], b"first")


async def test_a_models_requests_have_no_gap(log: RequestLog) -> None:
    assert await log.submit(in_lane("m", 1), b"") == "early"
    assert await log.submit(in_lane("m", 0), b"") == "new"
    assert await log.submit(in_lane("m", 1), b"") == "new"
    assert await log.submitted("m") == 1
    assert await log.submit(in_lane("other", 0), b"") == "new"


async def test_an_old_request_is_never_executed_again(log: RequestLog) -> None:
    log.limits.result_seconds = 0.001
    place = in_lane("m", 0)
    await log.submit(place, b"")
    await log.finish(place, b"")
    await asyncio.sleep(0.01)  # the result expires
    assert await log.submit(place, b"") == "gone"
    assert not await log.is_open(place.id) and await log.is_past(place.id)


async def test_kept_requests_stay_until_a_saved_state_has_them(log: RequestLog) -> None:
    places = [in_lane("m", seq) for seq in range(4)]
    for place in places:
        await log.submit(place, f"{place.seq}".encode())
        await log.finish(place, b"", keep=place.seq != 1)
    assert await log.kept("m") == [places[0], places[2], places[3]]
    await log.forget("m", 2)
    assert await log.kept("m") == [places[3]]
    assert await log.payload(places[3]) == b"3"


async def test_a_full_log_takes_no_request(log: RequestLog) -> None:
    log.limits.open, log.limits.lane_bytes = 2, 10
    assert await log.submit(in_lane("m", 0), b"x" * 11) == "new"
    assert await log.submit(in_lane("m", 1), b"") == "full"
    await log.finish(in_lane("m", 0), b"")
    assert await log.submit(in_lane("m", 1), b"") == "new"
    assert await log.submit(LogPlace("s", "learner"), b"") == "new"
    assert await log.submit(LogPlace("t", "learner"), b"") == "full"
    assert await log.submit(LogPlace("t", "sampler"), b"") == "new"


async def test_a_waiter_gets_the_result_when_it_comes(log: RequestLog) -> None:
    place = LogPlace("s:0", "sampler")
    await log.submit(place, b"")
    async with log.following():
        waiting = [asyncio.create_task(log.result(place.id, 60.0)) for _ in range(2)]
        await asyncio.sleep(0)
        await log.finish(place, b"answer")
        async with asyncio.timeout(30):
            assert await asyncio.gather(*waiting) == [b"answer"] * 2
    assert await log.result("never", 0.0) is None


async def test_beginnings_are_counted_until_the_end(log: RequestLog) -> None:
    place = in_lane("m", 0)
    await log.submit(place, b"")
    assert [await log.begin([place]), await log.begin([place])] == [[1], [2]]
    await log.finish(place, b"")
    assert await log.begin([place]) == [1]


async def test_a_beginning_whose_answer_was_lost_counts_once(redis_url: str, run_id: str) -> None:
    async with bad_network("127.0.0.1", port_of(redis_url)) as proxy, await connect(at_port(redis_url, proxy.port)) as client:
        log, places = RequestLog(client, run_id), [in_lane("m", 0), in_lane("n", 0)]
        for number in (1, 2, 3):
            proxy.lose = 1
            assert await log.begin(places) == [number, number] and proxy.lose == 0
        assert (await log.waiting("learner", 0.0, 0)).begun == {"m:0": 3, "n:0": 3}


async def test_records_are_found_by_kind_and_name(log: RequestLog) -> None:
    await log.set_record("session", "s", {"a": "1"})
    assert (await log.record("session", "s"), await log.record("model", "s")) == ({"a": "1"}, None)
    await log.set_record("session", "t", {"tenant": "one", "b": "2"})
    found = await log.use_record("one", "session", "t")
    assert found is not None and found[0] == {"tenant": "one", "b": "2"} and abs(found[1] - time.time()) < 60
    assert await log.use_record("two", "session", "t") is None
    assert await log.use_record("one", "session", "none") is None


async def test_a_tenants_results_without_a_session_have_one_bound(log: RequestLog) -> None:
    log.limits.result_bytes = 10
    places = [LogPlace(f"{'a' * TENANT_DIGITS}-{number}", "sampler") for number in range(5)]
    for place in places:
        await log.submit(place, b"")
        await log.finish(place, b"x" * 4)
    assert [await log.result(place.id) for place in places] == [None] * 3 + [b"x" * 4] * 2


async def test_a_record_comes_with_the_first_result(log: RequestLog) -> None:
    place, record = in_lane("m", 0), StageStep(step=0, time=1.0, metrics={"loss": 2.0})
    await log.submit(place, b"")
    assert [await log.finish(place, result, record=record) for result in (b"first", b"second")] == [True, False]
    [line] = await log.records.read("0", 10, 1)
    assert (line.model, line.fields["loss"]) == ("m", 2.0)


async def test_each_kind_of_event_goes_to_those_who_wait_for_it(log: RequestLog) -> None:
    sampled, learned = LogPlace("s:0", "sampler"), in_lane("m", 0)
    await log.submit(sampled, b"")
    await log.submit(learned, b"")
    await log.finish(sampled, b"")
    assert [(await log.wait(kind, "0"))[1] for kind in ("sampler", "learner", "result")] == [["s:0"], ["m:0"], ["s:0"]]


async def test_a_worker_sees_what_came_since_it_looked(log: RequestLog) -> None:
    first, second, other = LogPlace("s:0", "sampler"), LogPlace("s:1", "sampler"), in_lane("m", 0)
    await log.submit(first, b"a")
    await log.begin([first])
    async with asyncio.timeout(60), OpenRequests.of(log, "sampler") as requests:
        await requests.look()
        assert requests.places == [first] and requests.has_begun(first)
        news = asyncio.create_task(requests.news())
        await log.submit(other, b"")  # for the other worker
        await log.submit(second, b"b")
        assert await news
        await requests.look()
        assert requests.places == [first, second] and not requests.has_begun(second)
        assert await requests.take([second, first]) == [b"b", b"a"]
        assert await requests.take([second]) == [b"b"], "it is read again"
        await log.finish(first, b"")
        await requests.look()
        assert requests.places == [second]


async def test_a_worker_is_told_of_a_task_that_ends(log: RequestLog) -> None:
    async with asyncio.timeout(60), OpenRequests.of(log, "learner") as requests:
        assert not await requests.news([asyncio.create_task(asyncio.sleep(0))])
        assert await requests.news(), "two seconds have passed"


async def test_many_bytes_stay_in_the_log_until_they_are_taken(log: RequestLog) -> None:
    places = [LogPlace(f"s:{number}", "sampler") for number in range(4)]
    async with asyncio.timeout(60), OpenRequests.of(log, "sampler", most_bytes=3) as requests:
        for number, place in enumerate(places):
            await log.submit(place, b"xy" + bytes([number]))
        await requests.look()
        read = await log.waiting("sampler", 0.0, 5)
        assert requests.places == places and list(read.payloads) == ["s:0"]
        assert await requests.take(places) == [b"xy" + bytes([number]) for number in range(4)]


async def test_a_full_server_still_executes_and_answers(own_server: EmbeddedServer) -> None:
    """It takes no further request, and drops the samples of the page."""
    async with await connect(own_server.url) as client:
        log, place = RequestLog(client, "full"), in_lane("m", 0)
        await log.set_record("model", "m", {"tenant": "t"})
        await log.submit(place, b"a")
        await client.config_set("maxmemory", "1")
        with pytest.raises(StoreError, match="training service"):
            await log.submit(in_lane("m", 1), b"b")
        assert (await log.waiting("learner", 0.0, 10)).payloads == {place.id: b"a"}
        log.limits.record_seconds += 60  # which renews the record
        assert await log.use_record("t", "model", "m") is not None
        assert await log.begin([place]) == [1]
        await log.records.count({"t": {"steps": 1}})
        await log.records.add_sampled("m", SampledGroup("w", "p", 1, 0.0, 1.0, []))
        assert await log.finish(place, b"answer") and await log.result(place.id) == b"answer"
