"""The record of a load reaches the run from a thread without a client of it."""

import asyncio

import pytest

from polyreme.experience import loading
from polyreme.experience.run import Run
from polyreme_trainer.learner.loading import reports_to_run


async def test_a_load_is_recorded_in_the_run(redis_url: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "REPORT_SECONDS", 0.0)
    loaded = reports_to_run(redis_url, run.run_id)("critic")
    assert loaded is not None
    for fraction in (0.5, 1.0):
        await asyncio.to_thread(loaded, fraction)
    records = [record for _, record in await run.records("0", 0)]
    assert [(record["role"], record["fraction"]) for record in records if record["kind"] == "loading"] == [
        ("critic", 0.5),
        ("critic", 1.0),
    ]
