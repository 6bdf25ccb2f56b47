"""Programs that try to leave their sandbox, in every mode of this machine, as root and as the images' user."""

import json
import os
import subprocess
import sys

import pytest

from polyreme.isolation.sandbox.modes import why_not
from polyreme.isolation.sandbox.program import Mode
from support.escapes import ATTEMPTS, SECRET
from support.users import ROOT, SERVICE_USER, as_user


def attempt_all(mode: Mode, uid: int | None) -> dict[str, str]:
    """Returns what each attempt achieved."""
    argv = [sys.executable, "-m", "support.escapes", mode]
    if uid is not None and uid != os.geteuid():
        command = as_user(uid, argv)
        if command is None:
            pytest.skip("only root with bubblewrap and setpriv can be another user")
        argv = command
    clean = {"PATH": os.environ["PATH"], "POLYREME_TOKEN": SECRET}
    done = subprocess.run(argv, cwd=ROOT / "tests", env=clean, capture_output=True, text=True, timeout=800, check=False)
    answer = json.loads(done.stdout or "null")
    assert answer is not None, done.stderr
    assert uid is None or answer["user"] == uid
    assert done.returncode == any(answer["achieved"].values())
    return answer["achieved"]


def test_there_are_enough_attempts_and_each_has_its_name() -> None:
    assert len({attempt.name for attempt in ATTEMPTS}) == len(ATTEMPTS) >= 100


@pytest.mark.parametrize("uid", [None, SERVICE_USER])
@pytest.mark.parametrize("mode", [Mode.BUBBLEWRAP, Mode.LANDLOCK])
def test_no_attempt_succeeds_in_a_sandbox(mode: Mode, uid: int | None) -> None:
    if (reason := why_not(mode)) is not None:
        pytest.skip(f"{mode} does not work here: {reason}")
    achieved = attempt_all(mode, uid)
    assert len(achieved) == len(ATTEMPTS)
    assert {name: what for name, what in achieved.items() if what} == {}


def test_without_a_sandbox_the_harmless_ones_succeed() -> None:
    """Otherwise their failure inside a sandbox would prove nothing."""
    if os.geteuid() != 0:
        pytest.skip("what an unprivileged user may do to other processes depends on the machine")
    achieved = attempt_all(Mode.NONE, None)
    assert len(achieved) == sum(attempt.harmless for attempt in ATTEMPTS) >= 40
    assert [name for name, what in achieved.items() if not what] == []
