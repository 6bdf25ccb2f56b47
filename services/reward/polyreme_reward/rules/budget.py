"""A limit on the processor time of a computation.

Invariant: a computation under a limit ends soon after it, unless it is in one long operation of the interpreter, which the
callers exclude by limits on size. The limit counts the process's own processor time, so other load changes no result.
"""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OverBudget(BaseException):
    """The computation took too long. It derives from BaseException, since sympy handles every Exception of its parts."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises OverBudget in the block after that many seconds of processor time. Without effect outside of the main thread, which
    alone gets signals, and inside of another limit."""
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OverBudget

    before = signal.signal(signal.SIGVTALRM, stop)
    collecting = gc.isenabled()
    gc.disable()  # Python ignores what is raised inside of a collection, and reports it as an error of whatever it ran there
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.05)  # again, in case that a handler of the block has swallowed it
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        if collecting:
            gc.enable()
