"""Work in a thread: its result, its failure and its deadline reach the caller."""

import threading

import pytest

from polyreme.errors import UnavailableError
from polyreme_trainer.megatron.checkpoints.checkpoint_writer import BackgroundWork

GENEROUS = 60.0


def test_the_caller_goes_on_while_it_runs_and_then_has_its_result() -> None:
    may_end = threading.Event()

    def work() -> str:
        assert may_end.wait(GENEROUS)
        return threading.current_thread().name

    background = BackgroundWork("a test", work, GENEROUS)
    assert not background.finished()
    assert not background.end(0)
    may_end.set()
    assert background.finished(GENEROUS)
    assert background.result() == "a test"
    assert background.end(0)


def test_a_failure_is_raised_in_the_callers_thread_every_time() -> None:
    def work() -> None:
        raise OSError(28, "No space left on device")

    background = BackgroundWork("a test", work, GENEROUS)
    assert background.end(GENEROUS)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            background.finished()


def test_work_beyond_its_deadline_is_an_error_by_name() -> None:
    may_end = threading.Event()
    background = BackgroundWork("the checkpoint of version 3", lambda: may_end.wait(GENEROUS), 0.0)
    with pytest.raises(UnavailableError) as error:
        while not background.finished(0.01):
            pass
    assert error.value.expected.startswith("the checkpoint of version 3")
    may_end.set()
    assert background.end(GENEROUS)
