"""The responses to the page's requests, as JSON values.

Invariant: the functions only read. The offline report embeds the same values that the server sends.
"""

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from polyreme.display.report import engine_starting, loading_progress, replay
from polyreme.experience.metric_records import Line
from polyreme.page.notes import read_notes
from polyreme.rundir.progress import Progress
from polyreme.rundir.reader import RunReader, Sample, SampleQuery
from polyreme.rundir.reader.index_rows import WALL_TIME
from polyreme.rundir.reader.series import SECONDS, Series
from polyreme.rundir.run_directory import flat_settings

Answer = dict[str, Any]

POINTS = 800
"""Largest number of points of a curve."""
_EVENTS = 500
_LIVE = ("starting", "running", "draining")
_SWAPS = 20
"""Maximum number of a replica's swaps whose times are shown."""
_ACTIVITIES = ("start", "restart", "replicas", "loading", "engine_start")
_ACTIVITY_EVENTS = 100
"""Newest events of these kinds that decide what is being loaded."""
_TIMES = {
    "time/learner_wait": "learner_wait",
    "time/train": "train",
    "time/write": "write",
    "time/iteration": "seconds",
    WALL_TIME: "end",
}
"""The metrics of the timeline, and their names in it."""


def to_json(value: object) -> str:
    """JSON for a browser: in ASCII, since UTF-8 has no half characters, and with null for a number that is not finite."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), separators=(",", ":"))


def overview(name: str, reader: RunReader, indexed: bool) -> Answer:
    """A run's entry in the list of runs: state, progress and metrics; of one that cannot be read, the reason."""
    try:
        return _overview(name, reader, indexed)
    except Exception as error:  # noqa: BLE001 it must not hide the other runs
        reason = {"state": "unreadable", "reason": str(error), "activities": [], "metrics": [], "zeros": []}
        return {"name": name, "run": reader.run_id, "indexed": True, **reason}


def _overview(name: str, reader: RunReader, indexed: bool) -> Answer:
    summary, config, contents = reader.summary(), reader.config(), reader.contents()
    is_stage = "stage" in config
    return {
        "name": name,
        "run": reader.run_id,
        "state": summary.get("state", ""),
        "reason": summary.get("reason", ""),
        "activities": [*replays(summary), *activities(reader, time.time())]
        if summary.get("state") in _LIVE
        else summary.get("not_learned", []),
        "iteration": contents.iterations,
        "iterations": config.get("iterations") or (config.get("trainer") or {}).get("steps"),
        "metrics": contents.metrics,
        "zeros": contents.zeros,
        "origin": reader.origin and {"run": reader.origin.run_id, "iteration": reader.origin.iteration},
        "indexed": indexed,
        "is_stage": is_stage,
        "samples": contents.samples,
    }


def replays(summary: Line) -> list[str]:
    """How far a resumed run or stage repeats iterations or steps that are in its curves already; empty when it does not."""
    if summary.get("replayed") is None:
        return []
    return [replay(summary["replayed"], summary["iteration"] if "iteration" in summary else summary["step"])]


def final_values(reader: RunReader) -> Answer:
    """A run's row in the table of runs: the newest value of each metric, the settings that are not defaults, its duration in
    seconds, tags and note."""
    changed, settings = reader.changed_settings(), flat_settings(reader.config())
    spent = reader.curve(SECONDS, 1).mean
    return {
        **read_notes(reader.run_dir),
        "metrics": {name: value for name, value in reader.newest_values().items() if name != WALL_TIME},
        "settings": {key: value for key, value in settings.items() if changed is None or key in changed},
        "ended": reader.newest_values().get(WALL_TIME),
        "seconds": float(spent[-1]) if len(spent) else None,
    }


def activities(reader: RunReader, now: float) -> list[str]:
    """What a live run loads or starts, and about how long it still takes. `now`: Unix time."""
    progress = Progress(samples_per_iteration=1)
    for event in reader.events(_ACTIVITIES, newest=_ACTIVITY_EVENTS):
        progress.add(event)
    lines = [loading_progress(load) for load in progress.loading.values()]
    return lines + ([f"replica: {engine_starting(progress.engine_start, now)}"] if progress.engine_start else [])


def curves(reader: RunReader, wanted: Mapping[str, int], points: int = POINTS) -> Answer:
    """The curves of a run by metric, without metrics that have no points.

    Args:
        wanted: for each metric, the last step that the client has. Only later points are returned.
    """
    found = ((metric, reader.curve(metric, points, after + 1)) for metric, after in wanted.items())
    return {metric: _curve(series) for metric, series in found if len(series.steps)}


def _curve(series: Series) -> Answer:
    short = {"steps": series.steps.tolist(), "mean": _rounded(series.mean)}
    return short if series.low is series.mean else {**short, "low": _rounded(series.low), "high": _rounded(series.high)}


def sample_list(reader: RunReader, wanted: SampleQuery, offset: int, limit: int, whole: bool = False) -> Answer:
    """A page of samples, and the number of matching ones. Without `whole`, texts are cut to what a list shows."""
    total, found = reader.find_samples(wanted, offset, limit)
    if not whole:
        found = [{**each, "response": each["response"][:400], "prompt": each["prompt"][-400:]} for each in found]
    return {"total": total, "offset": offset, "samples": found}


def life(reader: RunReader, sample_id: str) -> Answer | None:
    """A sample with the texts of its tokens, the data of its iteration, and other samples of its prompt; None: no such sample."""
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
    }


def _peer(sample: Sample) -> Answer:
    return {key: sample[key] for key in ("id", "step", "score", "tokens", "response", "finish")}


def _at(reader: RunReader, sample: Sample) -> float | None:
    """Unix time at which the sample's iteration ended; None for answers in evaluations."""
    if sample["kind"] != "train":
        return None
    _, found = reader.series(WALL_TIME, sample["step"], sample["step"])
    return float(found[0]) if len(found) else None


def timeline(reader: RunReader, first: int, last: int) -> Answer:
    """The activity in iterations `first` to `last`: the learner's iterations, the groups, and the events of that time."""
    found = {name: dict(zip(*(part.tolist() for part in reader.series(name, first, last)), strict=True)) for name in _TIMES}
    ended = found.pop(WALL_TIME)
    iterations = [
        {"iteration": number, "end": ended[number], **{_TIMES[name]: times.get(number, 0.0) for name, times in found.items()}}
        for number in sorted(ended)
    ]
    if not iterations:
        return {"iterations": [], "groups": [], "events": []}
    groups = reader.group_spans(first, last)
    begin = min([iterations[0]["end"] - iterations[0]["seconds"], *(group["began"] for group in groups)])
    end = iterations[-1]["end"]
    end += 1.0 if last < reader.contents().iterations else max(1.0, iterations[-1]["seconds"])
    evaluations = [each for each in reader.events(["eval"], begin) if each["time"] - each.get("seconds", 0.0) <= end]
    others = reader.events(["commit", "saved", "restart", "alarm", "start"], begin, end)
    return {"iterations": iterations, "groups": groups, "events": sorted(evaluations + others, key=lambda event: event["time"])}


def servers(reader: RunReader) -> list[Answer]:
    """The rollout replicas from the records, the registered ones first: address, version, swaps, and `state`: "registered",
    "gone", or "ended" where the run has ended while it was registered."""
    known: dict[str, Answer] = {}
    registered: Mapping[str, str] = {}
    present = "registered" if reader.summary().get("state") in _LIVE else "ended"

    def of(name: str) -> Answer:
        return known.setdefault(name, {"name": name, "address": "", "version": None, "swaps": 0, "stall_seconds": [], "path": ""})

    for event in reader.events(["start", "replicas"]):
        registered = event.get("replicas", {})  # a new start discards the replicas of the previous one
        for name, address in registered.items():
            of(name)["address"] = address
    for name, (count, commits) in reader.commits(_SWAPS).items():
        last = commits[-1]
        stalls = [commit["stall_seconds"] for commit in commits]
        known[name] = of(name) | {
            "version": last["version"],
            "path": last.get("path", ""),
            "at": last["time"],
            "swaps": count,
            "stall_seconds": stalls,
        }
    for replica in known.values():
        replica["state"] = present if replica["name"] in registered else "gone"
    return sorted(known.values(), key=lambda replica: (replica["state"] == "gone", replica["name"]))


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
    return reader.events(kinds, newest=_EVENTS)[::-1]


def holding_alarms(reader: RunReader) -> list[str]:
    """The alarms of the newest iteration."""
    found = reader.events(["iteration"], newest=1)
    return list(found[-1]["alarms"]) if found and found[-1]["iteration"] == reader.contents().iterations else []


def details(reader: RunReader) -> Answer:
    """The page's data about one run, except curves and samples."""
    return {
        "summary": reader.summary(),
        "config": reader.config(),
        "changed": reader.changed_settings(),
        "events": events(reader),
        "servers": servers(reader),
        "alarms": holding_alarms(reader),
    }


def _rounded(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
