"""Records and sample lines as rows of the index."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from polyreme.experience.metric_records import Evaluation, IterationTrained, Line, SamplesServed, StageStep, read_record
from polyreme.rundir.reader.scalars import scalars

WALL_TIME = "time"
"""The metric that holds the Unix time at which an iteration ended."""
_WITHOUT_EVENT = ("iteration", "rollout", "sft", "step", "samples", "eval_progress", "resumed")


@dataclass(frozen=True)
class SampleRow:
    """The index's row of a sample.

    Attributes:
        id: GROUP.SAMPLE of a trained sample, vVERSION.ROW of an answer in an evaluation,
            vVERSION.ROW.ANSWER where each prompt has several.
        kind: "train" or "eval".
        step: the iteration that trained it, or the evaluated version.
        group, position: group and position of a trained sample; for an answer, its row and 0.
        oldest, newest: oldest and newest version that sampled its tokens; None when the line does not have them.
        advantage: mean over its trained tokens; None when unknown.
        logprob: mean log-probability of its tokens in nats; None when unknown.
        score: None where only a client of the training service knows it.
        began: Unix time at which its group's generation began; None when unknown.
    """

    id: str
    kind: str
    step: int
    group: int
    position: int
    prompt: str
    label: str
    response: str
    score: float | None
    tokens: int
    finish: str
    oldest: int | None
    newest: int | None
    replicas: list[str]
    advantage: float | None
    logprob: float | None
    began: float | None
    generate_seconds: float
    score_seconds: float


def sample_row(line: Line) -> SampleRow:
    """The row of a line of `samples/iteration_N.jsonl` or `samples/evaluation_N.jsonl`."""
    trained = "group" in line
    versions = [span[0] for span in line.get("spans", ())] or ([] if trained else [line["version"]])
    advantage, turns = line.get("advantage"), line.get("turns", ())
    return SampleRow(
        id=sample_id(line),
        kind="train" if trained else "eval",
        step=line["iteration"] if trained else line["version"],
        group=line["group"] if trained else line["row"],
        position=line["sample"] if trained else 0,
        prompt=line["prompt"],
        label=str(line.get("label", "")),
        response=line["response"],
        score=line.get("score"),
        tokens=line.get("tokens", 0),
        finish=line.get("finish_reason", ""),
        oldest=min(versions, default=None),
        newest=max(versions, default=None),
        replicas=list(line.get("replicas", ())),
        advantage=_mean(advantage, turns) if isinstance(advantage, list) else advantage,
        logprob=_mean(line.get("logprobs") or [], turns),
        began=line.get("began"),
        generate_seconds=line.get("generate_seconds", 0.0),
        score_seconds=line.get("score_seconds", 0.0),
    )


def sample_id(line: Line) -> str:
    """The id of a sample within its run."""
    if "group" in line:
        return f"{line['group']}.{line['sample']}"
    return f"v{line['version']}.{line['row']}" + (f".{line['answer']}" if "answer" in line else "")


def points_of(record: Line) -> Iterator[tuple[str, float, int]]:
    """The numbers of a record that can be plotted: (name, value, step)."""
    yield from scalars(record)
    if step := step_of(record):
        yield WALL_TIME, record["time"], step


def step_of(line: Line) -> int:
    """The progress of the run or stage at this record, in iterations or steps; 0 for a record of another kind."""
    match read_record(line):
        case IterationTrained(iteration=number) | StageStep(step=number):
            return number
    return 0


def sample_files_of(line: Line) -> tuple[list[str], Sequence[str]]:
    """The names of the sample files that are complete when this record is written, and of those that are deleted for them. A file
    is missing if its iteration's groups had been deleted."""
    match read_record(line):
        case IterationTrained(iteration=number):
            return [f"iteration_{number:04d}.jsonl"], ()
        case Evaluation(version=number):
            return [f"evaluation_{number:04d}.jsonl"], ()
        case SamplesServed(file=name, dropped=dropped):
            return [name], dropped
    return [], ()


def event_of(record: Line) -> dict[str, object] | None:
    """The index's entry for a record that is not a row of numbers; None for any other."""
    if record["kind"] in _WITHOUT_EVENT:
        return {"iteration": record["iteration"], "alarms": record["alarms"]} if record.get("alarms") else None
    return {key: value for key, value in record.items() if key not in ("run", "id", "kind", "time", "examples")}


def _mean(values: list[float], turns: Sequence[Line]) -> float | None:
    """The mean over a response's sampled tokens, which are all of them unless it has turns. None: there are no numbers."""
    if turns:
        values = [value for turn in turns for value in values[turn["start"] : turn["end"]]]
    return sum(values) / len(values) if values else None
