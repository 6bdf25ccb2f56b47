"""Runs untrusted programs. `modes` finds a working isolation, `run` starts and watches programs, `inside` runs in the sandbox."""
