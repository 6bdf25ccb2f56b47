"""What `polyreme up` shows: a view that redraws itself on a terminal, one line per event elsewhere.

Both read the same Progress and change nothing.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyreme.config import RunConfig
from polyreme.progress import SPLIT, Progress, Record

_ROWS = 12
_SPARKS = " " + "".join(chr(0x2581 + eighth) for eighth in range(8))
_SFT_LINE_SECONDS = 10.0


class View(Protocol):
    """Shows a run while it goes on. Use as a context manager."""

    def __enter__(self) -> "View": ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, record: Record, progress: Progress) -> None:
        """Shows a record that `progress` has just taken in."""

    def status(self, text: str) -> None:
        """Says what the run is doing."""


def view(config: RunConfig, console: Console) -> View:
    """The live view on a terminal, plain lines elsewhere."""
    return LiveView(config, console) if console.is_terminal else PlainView(config, console)


class PlainView:
    """One line per iteration, evaluation, alarm and notice; a line now and then of the warm start."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        self._config, self._console = config, console
        self._sft_shown = float("-inf")

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self, text: str) -> None:
        self._print(text)

    def show(self, record: Record, progress: Progress) -> None:
        if record["kind"] == "sft":
            if record["time"] - self._sft_shown < _SFT_LINE_SECONDS and record["step"] < record["steps"]:
                return
            self._sft_shown = record["time"]
        if line := plain_line(record, progress, self._config.iterations):
            self._print(line)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """Redraws on each record, and at most four times a second."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        self._config, self._status = config, "starting"
        self._progress = Progress(config.samples_per_iteration)
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def status(self, text: str) -> None:
        self._status = text

    def show(self, record: Record, progress: Progress) -> None:
        self._progress = progress

    def _render(self) -> RenderableType:
        return render(self._config, self._progress, self._status)


def plain_line(record: Record, progress: Progress, iterations: int) -> str | None:
    """A record as a line of text; None for kinds that need no telling."""
    match record["kind"]:
        case "iteration":
            versions = " ".join(f"{replica}@{version}" for replica, version in sorted(progress.replicas.items()))
            accuracy = progress.accuracy()
            return (
                f"iteration {record['iteration']:>{len(str(iterations))}}/{iterations}  reward {record['reward/mean']:.3f}"
                f"  accuracy {'-' if accuracy is None else format(accuracy, '.3f')}"
                f"  length {record['response/length_mean']:.1f}  tokens/s {record['tokens_per_second']:,.0f}"
                f"  {record['time/iteration']:.2f} s ({_shares(record)})  {versions}"
                + ("  ALARM" if record.get("alarms") else "")  # its record has the text, once
            )
        case "eval":
            return f"evaluation of version {record['version']}: accuracy {record['accuracy']:.3f} on {record['samples']} prompts in {record['seconds']:.1f} s"
        case "sft":
            return f"warm start {record['phase']}: step {record['step']}/{record['steps']}  loss {record['loss']:.4f}  tokens/s {record['tokens_per_second']:,.0f}"
        case "sft_done":
            return f"warm start done in {record['seconds']:.1f} s"
        case "gate":
            return f"gate {record['name']}: {record['value']:.3g} (limit {record['limit']:.3g})"
        case "saved":
            return f"saved iteration {record['iteration']}: {record['path']}"
        case "alarm":
            return f"ALARM {record['text']}"
        case "notice":
            return f"{record['service']}: {record['text']}"
    return None


def render(config: RunConfig, progress: Progress, status: str) -> RenderableType:
    """The whole live view, drawn from the state."""
    done = max(progress.iterations, default=0)
    head = Text.assemble((config.name, "bold"), f"  {status}  ", (f"iteration {done}/{config.iterations}", "cyan"))
    if progress.sft:
        sft = progress.sft
        head.append(f"  warm start {sft['phase']}: step {sft['step']}/{sft['steps']}  loss {sft['loss']:.3f}")
    rewards = [record["reward/mean"] for _, record in sorted(progress.iterations.items())]
    bar = Table.grid()  # alone, a bar does not end its line
    bar.add_row(ProgressBar(total=config.iterations, completed=done, width=60))
    parts: list[RenderableType] = [head, bar]
    if rewards:
        parts += [Text(f"reward   {sparkline(rewards[-60:])}  {rewards[-1]:.3f}", "green"), _table(progress)]
    if progress.replicas:
        versions = "  ".join(f"{replica} at {version}" for replica, version in sorted(progress.replicas.items()))
        parts.append(Text(f"replicas {versions}", "dim"))
    parts += [Text(notice, "dim") for notice in list(progress.notices)[-2:]]
    parts += [Text(f"alarm: {alarm}", "bold red") for alarm in list(progress.alarms)[-3:]]
    return Panel(Group(*parts), border_style="blue")


def sparkline(values: Iterable[float]) -> str:
    """One character a value, the height between 0 and the largest (at least 1)."""
    heights = list(values)
    top = max([1.0, *heights])
    return "".join(_SPARKS[round(max(0.0, value) / top * (len(_SPARKS) - 1))] for value in heights)


def report(config: RunConfig, progress: Progress, run_dir: Path) -> list[str]:
    """What is said at the end: accuracy before and after, five answers, where the time went, where things are."""
    before, after = progress.accuracy(first=True), progress.accuracy()
    lines = []
    if before is not None and after is not None:
        lines.append(f"accuracy {before:.3f} before, {after:.3f} after {len(progress.iterations)} iterations")
        newest = progress.evaluations[max(progress.evaluations)]
        lines += [
            f"  {example['score']:g}  {example['prompt']} -> {example['response']}  (right: {example['label']})"
            for example in newest.get("examples", ())[:5]
        ]
    seconds = progress.rl_seconds()
    if seconds:
        split = ", ".join(f"{name} {value / seconds:.0%}" for name, value in progress.time_split().items())
        rate = len(progress.iterations) * config.samples_per_iteration / seconds
        lines.append(f"time     warm start {progress.sft_seconds:.1f} s, reinforcement learning {seconds:.1f} s: {split}")
        lines.append(f"speed    {rate:.1f} samples/s")
    lines.append(f"run      {run_dir}")
    if progress.saved:
        lines.append(f"model    {progress.saved['hf_path']}")
    return lines


def _table(progress: Progress) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("iteration", "reward", "accuracy", "length", "tokens/s", "seconds", "wait / train / write", "mismatch"):
        table.add_column(column, justify="right")
    for number, record in sorted(progress.iterations.items())[-_ROWS:]:
        accuracy = progress.evaluations.get(number, {}).get("accuracy")
        table.add_row(
            str(number),
            f"{record['reward/mean']:.3f}",
            "" if accuracy is None else f"{accuracy:.3f}",
            f"{record['response/length_mean']:.1f}",
            f"{record['tokens_per_second']:,.0f}",
            f"{record['time/iteration']:.2f}",
            _shares(record, names=False),
            f"{record.get('mismatch_kl', 0.0):.1e}",
        )
    return table


def _shares(record: Record, names: bool = True) -> str:
    total = record["time/iteration"] or 1.0
    shares = [(key.removeprefix("time/"), record.get(key, 0.0) / total) for key in SPLIT.values()]
    return " ".join(f"{name} {share:.0%}" if names else f"{share:.0%}" for name, share in shares)
