"""What `polyreme up` shows: a view that redraws itself on a terminal, one line per event elsewhere.

Both read the same Progress and change nothing.
"""

import os
import sys
import termios
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyreme.cli.progress import SPLIT, Progress, Record
from polyreme.config.run import RunConfig

_ROWS = 12
_SPARKS = " " + "".join(chr(0x2581 + eighth) for eighth in range(8))
_SFT_LINE_SECONDS = 10.0
_LASTING = ("alarm", "eval_failed")


class View(Protocol):
    """Shows a run while it goes on. Use as a context manager."""

    def __enter__(self) -> "View": ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, record: Record, progress: Progress) -> None:
        """Shows a record that `progress` has just taken in."""

    def status(self, text: str) -> None:
        """Says what the run is doing."""


def view(config: RunConfig, console: Console) -> View:
    """The live view on a terminal that can redraw, plain lines elsewhere."""
    redraws = console.is_terminal and not console.is_dumb_terminal
    return LiveView(config, console) if redraws else PlainView(config, console)


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
        self._config, self._console, self._status = config, console, "starting"
        self._progress = Progress(config.samples_per_iteration)
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> "LiveView":
        _echo_keys(False)  # a ^C or a line feed in the view would move it
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        _echo_keys(True)

    def status(self, text: str) -> None:
        self._status = text

    def show(self, record: Record, progress: Progress) -> None:
        self._progress = progress
        if record["kind"] in _LASTING and (line := plain_line(record, progress, self._config.iterations)):
            self._console.print(Text(line), style="bold red", soft_wrap=True)  # above the view, where it stays

    def _render(self) -> RenderableType:
        return render(self._config, self._progress, self._status, self._console.size)


def _echo_keys(on: bool) -> None:
    with suppress(OSError, ValueError, termios.error):  # no terminal, or none any more
        terminal = sys.stdin.fileno()
        if os.tcgetpgrp(terminal) != os.getpgrp():
            return  # in the background it is not ours to set
        modes = termios.tcgetattr(terminal)
        modes[3] = modes[3] | termios.ECHO if on else modes[3] & ~termios.ECHO
        termios.tcsetattr(terminal, termios.TCSANOW, modes)


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
                f"  {record['time/iteration']:.2f} s ({_shares(record, progress)}){_staleness(record)}  {versions}"
                + ("  ALARM" if record.get("alarms") else "")  # its record has the text, once
            )
        case "eval":
            return f"evaluation of version {record['version']}: accuracy {record['accuracy']:.3f} on {record['samples']} prompts in {record['seconds']:.1f} s"
        case "eval_failed":
            return f"EVALUATION FAILED: {record['text']}"
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


def render(config: RunConfig, progress: Progress, status: str, size: tuple[int, int] = (100, 40)) -> RenderableType:
    """The whole live view, drawn from the state, within `size` (columns, lines): every part but the table is one line."""
    width, height = size[0] - 4, size[1] - 3  # borders; the cursor's own line
    done = max(progress.iterations, default=0)
    head = Text.assemble((config.name, "bold"), f"  {status}  ", (f"iteration {done}/{config.iterations}", "cyan"))
    if progress.evaluations:
        version = max(progress.evaluations)
        head.append(f"  accuracy {progress.evaluations[version]['accuracy']:.3f} at version {version}", "cyan")
    if progress.sft:
        sft = progress.sft
        head.append(f"  warm start {sft['phase']}: step {sft['step']}/{sft['steps']}  loss {sft['loss']:.3f}")
    bar = Table.grid()  # alone, a bar does not end its line
    bar.add_row(ProgressBar(total=config.iterations, completed=done, width=min(60, width)))
    foot: list[RenderableType] = []
    if progress.replicas:
        versions = "  ".join(f"{replica} at {version}" for replica, version in sorted(progress.replicas.items()))
        foot.append(_line(f"replicas {versions}", "dim"))
    foot += [_line(notice, "dim") for notice in list(progress.notices)[-2:]]
    foot += [_line(f"alarm: {alarm}", "bold red") for alarm in list(progress.alarms)[-3:]]
    parts: list[RenderableType] = [_line(head), bar]
    rewards = [record["reward/mean"] for _, record in sorted(progress.iterations.items())]
    if rewards:
        sparks = sparkline(rewards[-min(60, max(1, width - 18)) :])
        rows = min(_ROWS, max(1, height - len(parts) - len(foot) - 2))
        parts += [_line(f"reward   {sparks}  {rewards[-1]:.3f}", "green"), _table(progress, rows, width)]
    return Panel(Group(*parts, *foot), border_style="blue")


def _line(text: str | Text, style: str = "") -> Text:
    """Text that is cut where the line ends."""
    line = Text(text.replace("\n", " "), style) if isinstance(text, str) else text
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def sparkline(values: Iterable[float]) -> str:
    """One character a value, the height between 0 and the largest (at least 1)."""
    heights = list(values)
    top = max([1.0, *heights])
    return "".join(_SPARKS[round(max(0.0, value) / top * (len(_SPARKS) - 1))] for value in heights)


def report(config: RunConfig, progress: Progress, run_dir: Path) -> list[str]:
    """What is said at the end: accuracy before and after, five answers, where the time went, where things are."""
    lines = _accuracy_lines(progress)
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


def _accuracy_lines(progress: Progress) -> list[str]:
    before, after, trained = progress.accuracy(first=True), progress.accuracy_after(), max(progress.iterations, default=0)
    if not (progress.evaluations or progress.failed_evaluations):
        return []
    first = "unknown" if before is None else f"{before:.3f}"
    if after is None and (why := progress.failed_evaluations.get(trained)):
        return [f"accuracy {first} before; UNKNOWN after {trained} iterations, since version {trained} was not evaluated: {why}"]
    if after is None:
        return [f"accuracy {first} before; the run was stopped after {trained} iterations, before its last evaluation"]
    lines = [f"accuracy {first} before, {after:.3f} after {len(progress.iterations)} iterations"]
    for example in progress.evaluations[trained].get("examples", ())[:5]:
        prompt, response, label = (_short(str(example[key])) for key in ("prompt", "response", "label"))
        lines.append(f"  {example['score']:g}  {prompt} -> {response}  (right: {label})")
    return lines


def _short(text: str, most: int = 200) -> str:
    """One line of a text, its middle left out when it is long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else f"{line[: most // 2]} ... {line[-most // 2 :]}"


def _table(progress: Progress, rows: int, width: int) -> Table:
    """The newest iterations, in as many columns as the width has room for."""
    shares = "wait/train/write" + ("/rollouts" if progress.rollout_waits else "")
    lines = []
    for number, record in sorted(progress.iterations.items())[-rows:]:
        accuracy, mismatch = progress.evaluations.get(number, {}).get("accuracy"), record.get("mismatch_kl")
        lines.append(
            {
                "iteration": str(number),
                "reward": f"{record['reward/mean']:.3f}",
                "accuracy": "" if accuracy is None else f"{accuracy:.3f}",
                "length": f"{record['response/length_mean']:.1f}",
                "tokens/s": f"{record['tokens_per_second']:,.0f}",
                "seconds": f"{record['time/iteration']:.2f}",
                shares: _shares(record, progress, names=False),
                "staleness": _staleness(record).split()[-1] if _staleness(record) else "",
                "mismatch": "" if mismatch is None else f"{mismatch:.1e}",
            }
        )
    columns = {
        name: max(len(name), *(len(line[name]) for line in lines)) for name in lines[0] if any(line[name] for line in lines)
    }
    for name in ("staleness", "mismatch", "length", shares, "tokens/s", "seconds", "accuracy"):
        if sum(columns.values()) + 2 * len(columns) > width:
            columns.pop(name, None)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*(line[name] for name in columns))
    return table


def _shares(record: Record, progress: Progress, names: bool = True) -> str:
    """Of an iteration's time: the learner's waiting, training and writing, and beside them what replicas had nothing to do for."""
    total = record["time/iteration"] or 1.0
    shares = [(key.removeprefix("time/").removeprefix("learner_"), record.get(key, 0.0)) for key in SPLIT.values()]
    if (idle := progress.rollout_waits.get(record["iteration"])) is not None:
        shares.append(("rollouts wait", idle))
    return " ".join(f"{name} {seconds / total:.0%}" if names else f"{seconds / total:.0%}" for name, seconds in shares)


def _staleness(record: Record) -> str:
    """How many samples there are of staleness 0/1/...; nothing where all are on-policy."""
    samples = record.get("staleness/samples", ())
    return f"  staleness {'/'.join(map(str, samples))}" if len(samples) > 1 else ""
