"""One tracker's process: python -m polyreme_trainer.observe.trackers RUN_DIR RUN_ID KIND [--last]

SIGTERM, or --last, asks it to send the existing records of metrics.jsonl and end. A tracker's failure ends it with a traceback.
"""

import signal
import sys
from pathlib import Path
from threading import Event

stopping = Event()
signal.signal(signal.SIGTERM, lambda *_: stopping.set())  # before the slow imports

from polyreme.config.load import load_any  # noqa: E402
from polyreme.process import logging_setup  # noqa: E402
from polyreme_trainer.observe.trackers.follow import run_tracker  # noqa: E402


def main(run_dir: str, run_id: str, kind: str, *last: str) -> None:
    """Follows the run until it is asked to end."""
    logging_setup.setup(f"tracker {kind}")
    if last:
        stopping.set()
    config = load_any(Path(run_dir) / "config.yaml")
    run_tracker(config, run_id, next(section for section in config.trackers if section.kind == kind), stopping)


if __name__ == "__main__":
    main(*sys.argv[1:])
