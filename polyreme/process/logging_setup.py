"""The log format of all processes: one line per record on stderr, and every thread's stack if a library's crash ends the process.

Invariant: only the process's entry point configures logging. `POLYREME_LOG=debug|info|warning` sets the level.
"""

import faulthandler
import logging
import os
import time


def setup(service: str) -> None:
    """Sends this process's log records to stderr as `time level service: text`. Times are UTC."""
    formatter = logging.Formatter(f"%(asctime)s %(levelname)-7s {service}: %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    faulthandler.enable(2)  # by number, since a captured sys.stderr has no file
    wanted = os.environ.get("POLYREME_LOG") or "info"
    level = logging.getLevelNamesMapping().get(wanted.upper())
    if level is None:
        logging.warning("expected debug, info or warning in POLYREME_LOG; found %r, so it is info", wanted)
    for name in ("polyreme", "polyreme_rollout", "polyreme_reward", "polyreme_environment", "polyreme_trainer"):
        logging.getLogger(name).setLevel(logging.INFO if level is None else level)
