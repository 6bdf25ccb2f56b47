"""One piece of work in a separate thread, with a deadline.

Invariant: the caller learns of a failure: `finished` raises the work's error, or its own once the deadline has passed. The thread is a
daemon, so work that never returns, as on a dead file system, does not keep the process alive.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from polyreme.errors import UnavailableError

T = TypeVar("T")


class BackgroundWork(Generic[T]):
    """Starts `work` at once.

    Args:
        name: a description of the work, for the thread's name and for errors.
        seconds: the deadline.
    """

    def __init__(self, name: str, work: Callable[[], T], seconds: float) -> None:
        self._name, self._work, self._seconds = name, work, seconds
        self._deadline = time.monotonic() + seconds
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def finished(self, seconds: float = 0.0) -> bool:
        """Waits up to `seconds` for the end of the work. Returns whether it has succeeded.

        Raises:
            The work's error; or UnavailableError when it is not finished by the deadline.
        """
        if not wait([self._future], seconds).done:
            if time.monotonic() > self._deadline:
                raise UnavailableError(
                    f"{self._name} within {self._seconds:.0f} s", "not finished", "Check the file system of the run directory."
                )
            return False
        self._future.result()
        return True

    def result(self) -> T:
        """The return value of the finished work."""
        return self._future.result(0)

    def end(self, seconds: float) -> bool:
        """Waits up to `seconds` for the work to end, successfully or not. Returns whether it has ended."""
        return bool(wait([self._future], seconds).done)

    def _run(self) -> None:
        try:
            result = self._work()
        except BaseException as error:  # noqa: BLE001 - `finished` raises it in the caller's thread
            self._future.set_exception(error)
        else:
            self._future.set_result(result)
