"""Notices reach a real HTTP server and a real program, and no receiver delays the run."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyreme.config.notices import CommandConfig, WebhookConfig
from polyreme.config.run import RunConfig
from polyreme.experience.metric_records import MetricRecord, fields_of
from polyreme.experience.run import RunState
from polyreme.process.backoff import Backoff
from polyreme_trainer.launch.notifier import QUEUE, Notifier
from support.configs import run_config
from support.record_lines import read_evaluation
from support.waiting import until

ALARM = {"kind": "alarm", "text": "no gradient", "time": 1.0}
Records = list[dict[str, Any]]


class Hook:
    """An HTTP server that records its requests. `statuses` are its next replies; then 200. It replies when `replies` is set."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, Any], str | None]] = []
        self.statuses: list[int] = []
        self.replies = threading.Event()
        self.replies.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                hook.got.append((body, self.headers.get("authorization")))
                if not hook.replies.wait(300):
                    return
                self.send_response(hook.statuses.pop(0) if hook.statuses else 200)
                self.send_header("location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"


@pytest.fixture
def hook() -> Iterator[Hook]:
    found = Hook()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.replies.set()
    found.server.shutdown()
    found.server.server_close()
    thread.join()


@pytest.fixture
def emitted() -> Records:
    return []


def notifier(folder: Path, emitted: Records, *receivers: WebhookConfig | CommandConfig) -> Notifier:
    async def emit(record: MetricRecord) -> None:
        emitted.append(fields_of(record))

    config: RunConfig = run_config(folder, notices=list(receivers))
    config.run_dir.mkdir(parents=True)
    found = Notifier(config, "run-1", emit, Backoff(0.01, 0.02))
    found.start()
    return found


async def test_a_webhook_gets_what_it_asked_for_with_its_token(
    hook: Hook, tmp_path: Path, emitted: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "secret")
    found = notifier(tmp_path, emitted, WebhookConfig(url=hook.url, events=["done", "alarm"], token_env="HOOK"))
    found.know(read_evaluation({"kind": "eval", "version": 0, "accuracy": 0.1}), 0.1)
    found.take([ALARM, {"kind": "eval", "version": 8, "accuracy": 0.9, "time": 2.0}])
    await found.close((RunState.DONE, ""))
    assert [body["event"] for body, _ in hook.got] == ["alarm", "done"]
    assert {token for _, token in hook.got} == {"Bearer secret"}
    assert emitted == []


async def test_a_server_error_is_retried_and_a_refusal_is_not(hook: Hook, tmp_path: Path, emitted: Records) -> None:
    hook.statuses = [503, 429, 200, 401, 302]
    found = notifier(tmp_path, emitted, WebhookConfig(url=hook.url))
    found.take([ALARM, ALARM, ALARM])
    await found.close(None)
    assert len(hook.got) == 5  # three attempts, then one each; the redirect was not followed
    [record] = emitted
    assert record["kind"] == "notice" and "401" in record["text"]


async def test_a_token_that_cannot_be_sent_stops_no_later_notice(
    hook: Hook, tmp_path: Path, emitted: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "caf\u00e9")
    found = notifier(tmp_path, emitted, WebhookConfig(url=hook.url, token_env="HOOK"))
    found.take([ALARM])
    await until(lambda: bool(emitted))
    monkeypatch.setenv("HOOK", "cafe")
    await found.close((RunState.DONE, ""), seconds=60)
    assert [body["event"] for body, _ in hook.got] == ["done"]


async def test_attempts_are_limited(tmp_path: Path, emitted: Records, hook: Hook) -> None:
    hook.statuses = [500] * 10
    found = notifier(tmp_path, emitted, WebhookConfig(url=hook.url, attempts=3))
    found.take([ALARM])
    await found.close(None)
    assert len(hook.got) == 3 and len(emitted) == 1


async def test_nothing_waits_for_a_receiver_that_does_not_reply(hook: Hook, tmp_path: Path, emitted: Records) -> None:
    hook.replies.clear()
    found = notifier(tmp_path, emitted, WebhookConfig(url=hook.url, timeout=300))
    for number in range(3 * QUEUE):
        found.take([{**ALARM, "text": str(number)}])  # returns at once: more than the queue holds
    await found.close((RunState.FAILED, "x"), seconds=0.2)
    assert len(hook.got) <= 1


async def test_a_command_gets_the_notice_in_its_environment(tmp_path: Path, emitted: Records) -> None:
    script = (
        "import os, json; n = json.loads(os.environ['POLYREME_NOTICE']); print(n['event'], os.environ['POLYREME_NOTICE_TEXT'])"
    )
    found = notifier(tmp_path, emitted, CommandConfig(command=[sys.executable, "-c", script], timeout=300))
    await found.close((RunState.STOPPED, "asked"))
    assert (tmp_path / "runs" / "run" / "notices.log").read_text() == "stopped run stopped: asked\n"
    assert emitted == []


async def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path, emitted: Records) -> None:
    script = "sleep 1000 & echo $!; sleep 1000"
    found = notifier(tmp_path, emitted, CommandConfig(command=["sh", "-c", script], timeout=1.0, attempts=1))
    found.take([ALARM])
    await found.close(None, seconds=300)
    [record] = emitted
    assert "still runs" in record["text"]
    pid = int((tmp_path / "runs" / "run" / "notices.log").read_text())
    await until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def test_a_notice_that_cannot_be_sent_holds_up_no_other(tmp_path: Path, emitted: Records) -> None:
    found = notifier(tmp_path, emitted, CommandConfig(command=["sh", "-c", "echo $POLYREME_NOTICE_TEXT"], timeout=300))
    found.take([{**ALARM, "text": "no\0text"}, ALARM])
    await found.close(None)
    assert "no gradient" in (tmp_path / "runs" / "run" / "notices.log").read_text()
    assert "null byte" in emitted[0]["text"]
