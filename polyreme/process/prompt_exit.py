"""The end of a process whose work is done.

Invariant: what an exit of Python would write, remove or wait for has been written, removed and waited for.
"""

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def prompt_exit() -> Iterator[None]:
    """Ends the process after the block, with status 0 or that of the block's SystemExit. For the last statement of a program.

    It skips what only frees memory: Python takes a second to take apart torch's and vLLM's modules. Exit handlers run. Python
    exits as usual after another exception, with a message as status, while it waits for threads, and when an output is broken.
    """
    status = 0
    try:
        yield
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    if all(thread.daemon or thread is threading.main_thread() for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # Python reports it, with a status of its own
            sys.exit(status)
        os._exit(status & 0xFF)
    sys.exit(status)
