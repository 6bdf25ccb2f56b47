"""A run as text: one line per record while it runs, and a report at its end."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from shlex import quote

from polyreme.config.run import RunConfig
from polyreme.experience.metric_records import (
    Alarm,
    CheckpointSaved,
    EngineStart,
    Evaluation,
    EvaluationFailed,
    EvaluationProgress,
    GateMeasured,
    IterationTrained,
    Line,
    Loading,
    ReplicasChanged,
    Restart,
    Resumed,
    ServiceNotice,
    StageDone,
    StageEvaluation,
    StageStep,
    WarmStartDone,
    WarmStartStep,
    read_record,
)
from polyreme.experience.run import RunState
from polyreme.rundir.evaluations import evaluation_of
from polyreme.rundir.learning import learning_lines
from polyreme.rundir.progress import SPLIT, Progress

_STEP_METRICS = ("loss", "accuracy", "rewards/accuracies", "rewards/margins", "tokens_per_second")
"""Metrics of a stage's step that its line shows."""


def plain_line(line: Line, progress: Progress, iterations: int) -> str | None:
    """A record as a line of text, or None for kinds that are not shown."""
    match record := read_record(line):
        case IterationTrained(iteration=trained, metrics=metrics):
            number = f"iteration {trained:>{len(str(iterations))}}/{iterations}"
            if metrics.get("repeated"):
                return f"{number}  {replay(trained, progress.newest)}"
            versions = " ".join(f"{replica}@{version}" for replica, version in sorted(progress.versions.items()))
            score = progress.score()
            return (
                f"{number}  reward {metrics['reward/mean']:.3f}"
                f"  {progress.metric} {'-' if score is None else format(score, '.3f')}"
                f"  length {metrics['response_length/mean']:.1f}  tokens/s {metrics['tokens_per_second']:,.0f}"
                f"  {metrics['time/iteration']:.2f} s ({shares_of(record, progress)}){staleness_of(record)}  {versions}"
                + ("  ALARM" if record.alarms else "")  # the alarm's own record has the text
            )
        case StageStep(step=step, steps=steps, metrics=metrics):
            left = (steps - step) * metrics["time/step"]
            numbers = _numbers(metrics, _STEP_METRICS)
            return f"step {step}/{steps}  {numbers}" + (f"  remaining about {duration(left)}" if left else "")
        case StageEvaluation(step=step, metrics=metrics):
            return f"held out after step {step}  {_numbers(metrics, metrics)}"
        case StageDone(hf_path=path):
            return f"done           {path}"
        case Evaluation(version=version):
            name, value = evaluation_of(record)
            return f"evaluation of version {version}: {name} {value:.3f} on {record.samples} prompts in {record.seconds:.1f} s"
        case EvaluationProgress(version=version):
            return f"evaluation of version {version}: {evaluation_progress(record)}"
        case Resumed(number=start) if start < progress.newest:
            return replay(start, progress.newest)
        case Loading():
            return loading_progress(record)
        case EngineStart():
            return f"replica: {engine_progress(record)}"
        case EvaluationFailed(text=text):
            return f"EVALUATION FAILED: {text}"
        case WarmStartStep():
            left = progress.sft_remaining_seconds() or 0.0
            return (
                f"warm start {record.phase}: step {record.step}/{record.steps}  loss {_loss(record, 4)}"
                f"  tokens/s {record.tokens_per_second:,.0f}" + (f"  remaining about {duration(left)}" if left else "")
            )
        case WarmStartDone(seconds=seconds):
            return f"warm start done in {seconds:.1f} s"
        case GateMeasured():
            return f"gate {record.name}: {record.value:.3g} (limit {record.limit:.3g})"
        case CheckpointSaved():
            return f"saved {'step' if record.iteration is None else 'iteration'} {record.number}: {record.path}"
        case ReplicasChanged(replicas=replicas):
            return "replicas: " + (", ".join(f"{name} {url}".strip() for name, url in sorted(replicas.items())) or "none")
        case Restart():
            return f"{record.process} restarts: {record.text}"
        case Alarm(text=text):
            return f"ALARM {text}"
        case ServiceNotice(service=service, text=text):
            return f"{service}: {text}"
    return None


def _loss(record: WarmStartStep, digits: int) -> str:
    return "nan" if record.loss is None else f"{record.loss:.{digits}f}"


def _numbers(metrics: Mapping[str, object], names: Iterable[str]) -> str:
    return "  ".join(f"{name} {metrics[name]:.4g}" for name in names if metrics.get(name) is not None)


def replay(done: int, trained: int) -> str:
    """That a resumed learner repeats iterations, or a stage steps, and how far it is.

    Args:
        done: the newest that it has repeated, or that its checkpoint has.
        trained: the newest one before the resume.
    """
    return f"replaying {done} of {trained} after the resume"


def loading_progress(record: Loading) -> str:
    """The progress of loading a role's weights."""
    left = f", remaining about {duration(record.seconds_left)}" if record.fraction < 1 else ""
    return f"loading the {record.role}: {record.fraction:.0%}{left}"


def engine_progress(record: EngineStart) -> str:
    """The state of a replica's engine."""
    if record.seconds is not None:
        return f"{record.engine} started on {record.host} in {record.seconds:.1f} s"
    return f"{record.engine} starts on {record.host}"


def activities(progress: Progress) -> Iterator[str]:
    """What takes long at the moment and is no iteration, and about how long it still takes."""
    yield from map(loading_progress, progress.loading.values())
    if progress.replayed is not None:
        yield replay(progress.replayed, progress.newest)
    if sft := progress.sft:
        left = progress.sft_remaining_seconds()
        text = f"warm start {sft.phase}: step {sft.step}/{sft.steps}  loss {_loss(sft, 3)}"
        yield text + ("" if left is None else f"  remaining about {duration(left)}")
    if progress.evaluating:
        yield f"evaluates version {progress.evaluating.version}: {evaluation_progress(progress.evaluating)}"


def engine_starting(engine: EngineStart, now: float) -> str:
    """As `engine_progress`, with the duration until `now` of a start that is not complete."""
    return engine_progress(engine) + ("" if engine.seconds is not None else f", for {duration(now - engine.time)}")


def evaluation_progress(record: EvaluationProgress) -> str:
    """The progress of an evaluation."""
    return f"{record.answered} of {record.asked} answers, remaining about {duration(record.seconds_left)}"


def report(config: RunConfig, progress: Progress, run_dir: Path, state: RunState = RunState.DONE, reason: str = "") -> list[str]:
    """The final report: how the run ended, results before and after, five answers, the split of time, paths, what to do next."""
    lines = [f"{state:8} {reason}"] if reason else []
    if not config.iterations:  # an evaluation prints its own results
        return [*lines, f"run      {run_dir}"]
    lines += _result_lines(progress) + learning_lines(progress.not_learned())
    seconds = progress.rl_seconds()
    if seconds:
        split = ", ".join(f"{name} {value / seconds:.0%}" for name, value in progress.time_split().items())
        rate = progress.iterations * config.samples_per_iteration / seconds
        lines.append(f"time     warm start {progress.sft_seconds:.1f} s, reinforcement learning {seconds:.1f} s: {split}")
        lines.append(f"speed    {rate:.1f} samples/s")
    lines.append(f"run      {run_dir}")
    if progress.saved:
        lines.append(f"model    {progress.saved.hf_path}")
    return lines + next_lines(config, run_dir, state, progress.saved.hf_path if progress.saved else None)


def next_lines(config: RunConfig, run_dir: Path, state: RunState, model: str | None) -> list[str]:
    """Commands that a user needs after a run that ended in `state`. `model`: the trained model's directory, if there is one."""
    run, result = quote(str(run_dir)), quote(model or "")
    looks = [
        (f"ui {run}", "curves, samples and events in a browser"),
        (f"samples {run}", "what it was trained on"),
        *([(f"chat {run}", "ask its policy")] if model else []),
    ]
    match state:
        case RunState.DONE:
            judged = [(f"eval {quote(str(run_dir / 'config.yaml'))} --model {result}", "its policy on the held-out prompts")]
            steps = [
                *looks,
                *(judged if model and config.evaluation_sets else []),
                (f"compare {run} OTHER", "beside another run"),
            ]
        case RunState.STOPPED:
            steps = [*looks, (f"status {run}", "its progress; `polyreme up ... --resume` continues it")]
        case _:
            steps = [(f"logs {run}", "what its processes logged; `polyreme up ... --resume` continues it")]
    width = max(len(words) for words, _ in steps if not words.startswith("eval "))  # a long path stands out by itself
    return [f"{'next' if not place else '':8} polyreme {words:{width}}  # {about}" for place, (words, about) in enumerate(steps)]


def _result_lines(progress: Progress) -> list[str]:
    """The evaluations before and after training, or why one is missing, and answers from the newest one."""
    before, after, trained = progress.score(first=True), progress.score_after(), progress.newest
    if not (progress.evaluations or progress.failed_evaluations):
        return []
    first = f"{progress.metric:8} " + ("unknown" if before is None else f"{before:.3f}") + " before"
    if after is None and (why := progress.failed_evaluations.get(trained)):
        return [f"{first}; UNKNOWN after {trained} iterations, since version {trained} was not evaluated: {why}"]
    if after is None:
        newest = max(progress.evaluations, default=0)
        between = "" if newest < max(1, progress.first) else f", {progress.evaluations[newest]:.3f} after iteration {newest}"
        return [f"{first}{between}; version {trained} was not evaluated: the run ended before"]
    lines = [f"{first}, {after:.3f} after iteration {trained}"]
    for example in (progress.evaluation.examples if progress.evaluation else ())[:5]:
        prompt, response, label = (shortened(str(example[key])) for key in ("prompt", "response", "label"))
        lines.append(f"  {example['score']:g}  {prompt} -> {response}  (right: {label})")
    return lines


def shortened(text: str, most: int = 200) -> str:
    """A text on one line. A long text loses its middle."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-most // 2 :]}"


def shares_of(record: IterationTrained, progress: Progress, names: bool = True) -> str:
    """Shares of an iteration's time: the learner's waiting, training and writing, and separately the replicas' idle time."""
    total = record.metrics["time/iteration"] or 1.0
    shares = [
        (key.removeprefix("time/").removeprefix("learner_"), record.metrics.get(key, 0.0) / total) for key in SPLIT.values()
    ]
    if (idle := progress.rollout_wait(record.iteration)) is not None:
        shares.append(("rollouts wait", idle))
    return " ".join(f"{name} {share:.0%}" if names else f"{share:.0%}" for name, share in shares)


def staleness_of(record: IterationTrained) -> str:
    """Number of samples with staleness 0/1/..., or '' when all are on-policy."""
    samples = record.metrics.get("staleness/samples", ())
    return f"  staleness {'/'.join(map(str, samples))}" if len(samples) > 1 else ""


def duration(seconds: float) -> str:
    """A duration as 0:05, 12:34 or 1:02:03."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
