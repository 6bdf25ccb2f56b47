"""What the page asks for, as JSON values.

Invariant: functions of a reader that change nothing. The offline report embeds the same values as the server sends.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from polyreme.cli.reader import RunReader, Sample, SampleQuery
from polyreme.cli.reader.index_rows import WALL_TIME

Answer = dict[str, Any]

POINTS = 800
"""Largest number of points of a curve."""
_EVENTS = 500
_TIMES = {
    "time/learner_wait": "learner_wait",
    "time/train": "train",
    "time/write": "write",
    "time/iteration": "seconds",
    WALL_TIME: "end",
}
"""Metrics that the timeline is drawn from, and their names in it."""


def overview(name: str, reader: RunReader, indexed: bool) -> Answer:
    """A run in the list of runs: its state, how far it is, and which metrics it has."""
    summary, config = reader.summary(), reader.config()
    steps = reader.iterations() or len(reader.series("train/loss")[0])
    return {
        "name": name,
        "run": reader.run_id,
        "state": summary.get("state", ""),
        "reason": summary.get("reason", ""),
        "iteration": steps,
        "iterations": config.get("iterations") or (config.get("trainer") or {}).get("steps"),
        "metrics": reader.metrics(),
        "indexed": indexed,
        "is_stage": "stage" in config,
        "samples": reader.find_samples(SampleQuery(), limit=0)[0],
    }


def curves(readers: Mapping[str, RunReader], metrics: Iterable[str], points: int = POINTS) -> Answer:
    """Metric -> run -> its curve. `at` has the Unix times of the steps where the run recorded them."""
    found: Answer = {}
    for metric in metrics:
        found[metric] = {}
        for name, reader in readers.items():
            curve = reader.curve(metric, points)
            if len(curve.steps):
                short = {"steps": curve.steps.tolist(), "mean": _rounded(curve.mean)}
                if curve.low is not curve.mean:
                    short |= {"low": _rounded(curve.low), "high": _rounded(curve.high)}
                found[metric][name] = short
    return found


def sample_list(reader: RunReader, wanted: SampleQuery, offset: int, limit: int) -> Answer:
    """A page of samples and how many match."""
    total, found = reader.find_samples(wanted, offset, limit)
    return {
        "total": total,
        "offset": offset,
        "samples": [{**each, "response": each["response"][:400], "prompt": each["prompt"][-400:]} for each in found],
    }


def life(reader: RunReader, sample_id: str) -> Answer | None:
    """One sample with the texts of its tokens, what its iteration did, and other samples of its prompt; None: no such sample."""
    found = reader.sample(sample_id)
    if found is None:
        return None
    peers = SampleQuery(kind=found["kind"], prompt=found["prompt_number"], order="oldest")
    total, others = reader.find_samples(peers, limit=200)
    ids = found.get("token_ids") or []
    texts = reader.token_texts(ids)
    return {
        **found,
        "token_texts": texts if any(texts) else [],
        "trained_at": _at(reader, found),
        "peers": [_peer(other) for other in others],
        "peers_total": total,
        "commits": [event for event in reader.events(["commit"]) if event["version"] == (found["oldest"] or 0)][:8],
    }


def _peer(sample: Sample) -> Answer:
    return {key: sample[key] for key in ("id", "step", "score", "tokens", "response", "finish")}


def _at(reader: RunReader, sample: Sample) -> float | None:
    """Unix time at which the sample's iteration ended; None for answers in evaluations."""
    if sample["kind"] != "train":
        return None
    steps, times = reader.series(WALL_TIME)
    found = times[steps == sample["step"]]
    return float(found[0]) if len(found) else None


def timeline(reader: RunReader, first: int, last: int) -> Answer:
    """What every process did in iterations `first` to `last`: the learner's iterations, the groups, and the events of that time."""
    found = {name: dict(zip(*(part.tolist() for part in reader.series(name)), strict=True)) for name in _TIMES}
    ended = found.pop(WALL_TIME)
    iterations = [
        {"iteration": number, "end": ended[number], **{_TIMES[name]: times.get(number, 0.0) for name, times in found.items()}}
        for number in sorted(ended)
        if first <= number <= last
    ]
    if not iterations:
        return {"iterations": [], "groups": [], "events": []}
    groups = reader.group_spans(first, last)
    begin = min([iterations[0]["end"] - iterations[0]["seconds"], *(group["began"] for group in groups)])
    kinds = ["commit", "eval", "saved", "restart", "alarm", "start"]
    return {"iterations": iterations, "groups": groups, "events": reader.events(kinds, begin, iterations[-1]["end"] + 1.0)}


def servers(reader: RunReader) -> list[Answer]:
    """The rollout replicas as the records show them: address, version, swaps and restarts, the registered ones first."""
    known: dict[str, Answer] = {}
    registered: Mapping[str, str] = {}

    def of(name: str) -> Answer:
        return known.setdefault(name, {"name": name, "address": "", "version": None, "swaps": 0, "stall_seconds": [], "path": ""})

    for event in reader.events(["start", "replicas", "commit"]):
        match event["kind"]:
            case "start":
                registered = {}
            case "replicas":
                registered = event["replicas"]
                for name, address in registered.items():
                    of(name)["address"] = address
            case "commit":
                replica = of(event["replica"])
                replica |= {"version": event["version"], "path": event.get("path", ""), "at": event["time"]}
                replica["swaps"] += 1
                replica["stall_seconds"] = [*replica["stall_seconds"][-19:], event["stall_seconds"]]
    for replica in known.values():
        replica["registered"] = replica["name"] in registered
    return sorted(known.values(), key=lambda replica: (not replica["registered"], replica["name"]))


def events(reader: RunReader) -> list[Answer]:
    """The newest events, newest first: alarms, notices, restarts, evaluations, checkpoints, gates."""
    kinds = [
        "alarm",
        "notice",
        "restart",
        "eval",
        "eval_failed",
        "saved",
        "gate",
        "start",
        "tracker_failed",
        "sft_done",
        "done_learning",
        "done",
    ]
    return reader.events(kinds)[-_EVENTS:][::-1]


def holding_alarms(reader: RunReader) -> list[str]:
    """The alarms of the newest iteration."""
    found = reader.events(["iteration"])
    return list(found[-1]["alarms"]) if found and found[-1]["iteration"] == reader.iterations() else []


def details(reader: RunReader) -> Answer:
    """What the page shows about one run beside curves and samples."""
    return {
        "summary": reader.summary(),
        "config": reader.config(),
        "events": events(reader),
        "servers": servers(reader),
        "alarms": holding_alarms(reader),
    }


def _rounded(values: Any) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
