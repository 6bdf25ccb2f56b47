"""The record of a load reaches the run from a thread without a client of it."""

import asyncio

from polyreme.experience.run import Run
from polyreme_trainer.learner.run_client import reports_to_run


async def test_a_load_is_recorded_in_the_run(redis_url: str, run: Run) -> None:
    loaded = reports_to_run(redis_url, run.run_id, 0.0)("critic")
    assert loaded is not None
    for fraction in (0.5, 1.0):
        await asyncio.to_thread(loaded, fraction)
    records = [record for _, record in await run.records("0", 0)]
    assert [(record["role"], record["fraction"]) for record in records if record["kind"] == "loading"] == [
        ("critic", 0.5),
        ("critic", 1.0),
    ]
