"""Sends a run's notices to its receivers.

Invariant: no receiver can stop, fail or delay a run. Each has a queue of at most QUEUE notices, a deadline for each attempt and a
limited number of attempts. At the run's end, all receivers together have CLOSE_SECONDS.
"""

import asyncio
import json
import logging
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from polyreme.config.base import BaseConfig
from polyreme.config.notices import CommandConfig, ReceiverConfig, WebhookConfig
from polyreme.errors import PolyremeError, UnavailableError
from polyreme.experience.metric_records import Evaluation, Line, ServiceNotice, TrackerFailed
from polyreme.experience.run import RunState
from polyreme.process.backoff import Backoff
from polyreme.process.lifecycle import Child
from polyreme_trainer.observe.notices import Notice, NoticeRules

logger = logging.getLogger(__name__)

QUEUE = 100
CLOSE_SECONDS = 30.0
"""Time for the last notices at the run's end."""
_BACKOFF = Backoff(1.0, 30.0)
_RETRIED_CODES = (408, 425, 429)
_FIRST_SERVER_ERROR = 500

Emit = Callable[[ServiceNotice | TrackerFailed], Awaitable[None]]


class Sender(Protocol):
    """Delivers notices to one receiver."""

    async def send(self, notice: Notice) -> None:
        """Makes one attempt. Raises UnavailableError when another attempt may succeed, another error when it cannot."""


class Notifier:
    """The receivers of one run.

    Args:
        config, run_id: the run's configuration and id.
        emit: appends to the run's records.
        backoff: between two attempts to send a notice.
    """

    def __init__(self, config: BaseConfig, run_id: str, emit: Emit, backoff: Backoff = _BACKOFF) -> None:
        self._config, self._run_id = config, run_id
        self._rules = self._rules_after(None, None)
        self._receivers = [_Receiver(section, config, emit, backoff) for section in config.notices]

    def start(self) -> None:
        """Begins to send."""
        for receiver in self._receivers:
            receiver.start()

    def know(self, newest: Evaluation | None, best: float | None) -> None:
        """Sets the newest `eval` record that the run had before this start, and the best result that is comparable with it."""
        self._rules = self._rules_after(newest, best)

    def take(self, records: list[Line]) -> None:
        """Queues the notices about new records, each with its `time`."""
        self._queue(self._rules.of_records(records))

    async def close(self, end: tuple[RunState, str] | None, seconds: float = CLOSE_SECONDS) -> None:
        """Queues the notice about the run's end (None: unknown), sends the remaining notices within `seconds`, and stops."""
        if end is not None:
            self._queue([self._rules.of_end(*end, time.time())])
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(receiver.sent() for receiver in self._receivers))
        await asyncio.gather(*(receiver.close() for receiver in self._receivers))

    def _queue(self, notices: list[Notice]) -> None:
        for receiver in self._receivers:
            for notice in notices:
                receiver.put(notice)

    def _rules_after(self, newest: Evaluation | None, best: float | None) -> NoticeRules:
        return NoticeRules(self._run_id, self._config.name, str(self._config.run_dir), newest, best)


class _Receiver:
    """One receiver with its queue and its task."""

    def __init__(self, section: ReceiverConfig, config: BaseConfig, emit: Emit, backoff: Backoff) -> None:
        self._section, self._emit, self._backoff, self._failed = section, emit, backoff, False
        self._sender: Sender = WebhookSender(section) if isinstance(section, WebhookConfig) else CommandSender(section, config)
        self._waiting: asyncio.Queue[Notice] = asyncio.Queue(QUEUE)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"notices by {self._section.kind}")

    def put(self, notice: Notice) -> None:
        """Queues a notice about a configured event. A full queue drops its oldest notice."""
        if notice.event not in self._section.events:
            return
        if self._waiting.full():
            lost = self._waiting.get_nowait()
            self._waiting.task_done()
            logger.warning("dropped a notice to a %s, because %d are waiting: %s", self._section.kind, QUEUE, lost.text)
        self._waiting.put_nowait(notice)

    async def sent(self) -> None:
        """Waits until the queue is empty and its last notice has been delivered or abandoned."""
        await self._waiting.join()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if left := self._waiting.qsize():
            logger.warning("a %s did not get %d notice(s) in time", self._section.kind, left)

    async def _run(self) -> None:
        while True:
            notice = await self._waiting.get()
            try:
                await self._deliver(notice)
            finally:
                self._waiting.task_done()

    async def _deliver(self, notice: Notice) -> None:
        for attempt in range(1, self._section.attempts + 1):
            try:
                await self._sender.send(notice)
                return
            except UnavailableError as error:
                failure: Exception = error
            except Exception as error:  # noqa: BLE001 a token or a text may be none that can be sent
                failure = error
                break
            if attempt < self._section.attempts:
                await asyncio.sleep(self._backoff.draw(attempt))
        logger.warning("a notice (%s) could not be sent by %s: %s", notice.event, self._section.kind, failure)
        if not self._failed:  # one record is enough: all failures are in the log
            self._failed = True
            with suppress(PolyremeError):  # Redis may be unreachable
                short = f"{failure.found}. {failure.do}" if isinstance(failure, PolyremeError) else str(failure)
                text = f"no {notice.event} notice by {self._section.kind}: {short}"  # short, since the view cuts a long line
                await self._emit(ServiceNotice(service="train", text=text))


class WebhookSender:
    """POSTs notices to an HTTP endpoint. Follows no redirect, since the token is for this address only."""

    def __init__(self, section: WebhookConfig) -> None:
        self._section = section

    async def send(self, notice: Notice) -> None:
        import httpx  # a run without webhooks does not load it

        section = self._section
        token = os.environ.get(section.token_env, "").strip() if section.token_env else ""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        try:
            async with (
                asyncio.timeout(section.timeout),
                httpx.AsyncClient(verify=ssl.create_default_context(), timeout=None) as client,
            ):
                status = (await client.post(section.url, json=notice.payload(), headers=headers)).status_code
        except TimeoutError:
            raise UnavailableError("a reply to the notice", f"none within {section.timeout:g} s", "Check the endpoint.") from None
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise UnavailableError(
                "an endpoint that can be reached", f"{type(error).__name__}: {error}", "Check the address."
            ) from None
        if not 200 <= status < 300:
            kind = UnavailableError if status in _RETRIED_CODES or status >= _FIRST_SERVER_ERROR else PolyremeError
            raise kind("a reply with status 2xx to the notice", f"status {status}", "Check the endpoint and its token.")


class CommandSender:
    """Starts a program for each notice. Its output is in notices.log of the run directory."""

    def __init__(self, section: CommandConfig, config: BaseConfig) -> None:
        self._section, self._log_path = section, config.run_dir / "notices.log"

    async def send(self, notice: Notice) -> None:
        environment = {"POLYREME_NOTICE": json.dumps(notice.payload()), "POLYREME_NOTICE_TEXT": notice.text}
        child = Child.spawn("notice", self._section.command, environment, self._log_path)
        try:
            if not await child.gone(self._section.timeout):
                found = f"it still runs after {self._section.timeout:g} s"
                raise UnavailableError(
                    f"the end of {self._section.command[0]}", found, "Raise the timeout, or make the program faster."
                )
            if status := child.poll():
                raise UnavailableError(f"status 0 of {self._section.command[0]}", f"status {status}", f"See {self._log_path}.")
        finally:
            child.kill()
            await child.reap()
