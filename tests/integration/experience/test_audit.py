"""`polyreme audit` on a real log."""

import pytest

from polyreme.experience.audit import audit_main, render
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import Run


async def test_the_exit_status_of_the_command(
    redis_url: str, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "36")  # less than the title needs
    log = ExperienceLog(run)
    await log.take(Writer.LEARNER)
    await log.begin(0)
    await log.take(Writer.ORCHESTRATOR)
    await log.admit()
    await log.append(0, 1, b"payload", 0, 0.0)
    assert await audit_main(redis_url, run.run_id) == 0
    printed = capsys.readouterr().out
    assert "whole" in printed and printed.startswith(f"run {run.run_id} ("), "the run id is not wrapped"
    await run.redis.hdel(run.key("payloads"), 0)
    assert await audit_main(redis_url, run.run_id) == 1
    assert "NOT WHOLE" in capsys.readouterr().out
    assert render(await log.audit()).row_count == 12
