"""Who else uses this machine."""

import os
import subprocess
import sys

import pytest

from polyreme.process.machine import other_users


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_person_is_seen_and_one_of_the_system_is_not() -> None:
    code = "import os, sys; os.setuid(int(sys.argv[1])); print(flush=True); sys.stdin.read()"
    for uid, seen in ((12_345, True), (345, False)):
        with subprocess.Popen(
            [sys.executable, "-S", "-c", code, str(uid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stdout.readline()
            assert (uid in other_users()) is seen
            assert os.getuid() not in other_users()
            process.communicate()
