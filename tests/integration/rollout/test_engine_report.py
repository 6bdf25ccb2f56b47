"""The start of a replica's engine is a record of the run before the replica has a lease."""

from polyreme.experience.run import Run
from polyreme_rollout.run_spec import report_engine


async def test_the_start_of_an_engine_is_recorded_twice(redis_url: str, run: Run) -> None:
    await report_engine(redis_url, run.run_id, "vllm")
    await report_engine(redis_url, run.run_id, "vllm 0.32.0", 18.24)
    begun, over = [record for _, record in await run.records("0", 0) if record["kind"] == "engine_start"]
    assert begun["engine"] == "vllm" and "seconds" not in begun
    assert (over["engine"], over["seconds"]) == ("vllm 0.32.0", 18.2)
    assert (begun["host"], begun["pid"]) == (over["host"], over["pid"])
