"""Queries the stack's Prometheus from one of its containers: `scraped.py SECONDS DASHBOARD ABSENT...`.

Waits until all targets of every job are up, and every expression of the dashboard (JSON) has values. Expressions that begin with one of
ABSENT are skipped.
"""

import json
import sys
import time
import urllib.parse
import urllib.request
from typing import Any

JOBS = ("rollout", "reward", "trainer")


def query(expression: str) -> list[dict[str, Any]]:
    url = "http://prometheus:9090/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(url, timeout=5) as answer:
        result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return result


def missing(expressions: list[str]) -> list[str]:
    try:
        up = [(sample["metric"]["job"], sample["value"][1]) for sample in query("up")]
        found = [f"{job} is down" for job, value in up if value != "1"]
        found += [f"no target of {job}" for job in JOBS if job not in {job for job, _ in up}]
        return found + [f"no values of {expression}" for expression in expressions if not query(expression)]
    except OSError as error:
        return [f"Prometheus does not answer: {error}"]


def main() -> None:
    seconds, dashboard, absent = float(sys.argv[1]), json.loads(sys.argv[2]), tuple(sys.argv[3:])
    every = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    expressions = [expression for expression in every if not expression.startswith(absent)]
    deadline = time.monotonic() + seconds
    while (lacks := missing(expressions)) and time.monotonic() < deadline:
        time.sleep(2)
    print("\n".join(lacks) or f"every job is up, {len(expressions)} of {len(every)} expressions of the dashboard have values")
    sys.exit(bool(lacks))


if __name__ == "__main__":
    main()
