"""Waits for a condition on a run's records, inside its trainer's container: `wait_for.py EXPRESSION SECONDS [NAME]`.

The expression can use `iterations` (the newest iteration), `reward(first, last)` (mean over these iterations), `serving` (replicas that
committed one of the newest versions), `streamed` (those of them that received a version as a stream), `kinds` (of all records) and `state`.
NAME is the run's, by default sevens. The exit status is 0 when the expression holds, and 1 when the time is over.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from polyreme.experience.run import Run
from polyreme.experience.store import connect


def names(records: list[dict[str, Any]], state: str) -> dict[str, Any]:
    means = {record["iteration"]: record["reward/mean"] for record in records if record["kind"] == "iteration"}
    last = max(means, default=0)
    recent = [record for record in records if record["kind"] == "commit" and record["version"] >= last - 3]

    def reward(first: int, end: int) -> float:
        return fmean(means[iteration] for iteration in range(first, end + 1))

    return {
        "iterations": last,
        "reward": reward,
        "serving": {record["replica"] for record in recent},
        "streamed": {record["replica"] for record in recent if record["path"] in ("stream", "delta")},
        "kinds": {record["kind"] for record in records},
        "state": state,
    }


async def state() -> str:
    redis = await connect(os.environ["POLYREME_REDIS"])
    try:
        return str((await (await Run.attach(redis, None, 5)).state())[0])
    finally:
        await redis.aclose()


def main() -> None:
    expression, seconds = sys.argv[1], float(sys.argv[2])
    path = Path("/runs", sys.argv[3] if len(sys.argv) > 3 else "sevens", "metrics.jsonl")
    deadline = time.monotonic() + seconds
    while True:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        found = names([json.loads(line) for line in lines if line.endswith(b"\n")], asyncio.run(state()))
        good = found["iterations"] >= 2 and eval(expression, found)
        shown = {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in found.items()
            if name != "reward" and not name.startswith("_")
        }
        if good or time.monotonic() > deadline:
            print(f"{'seen' if good else f'not within {seconds:g} s'}: {expression}; {json.dumps(shown)}")
            sys.exit(0 if good else 1)
        time.sleep(1)


if __name__ == "__main__":
    main()
