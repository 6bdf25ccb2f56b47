"""What `polyreme up` shows: a view that redraws itself on a terminal, one line per event elsewhere.

Invariant: both read the same Progress and change nothing; what is shown as present is present (replicas, alarms), what is old leaves.
"""

import json
import os
import sys
import termios
import time
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

from polyreme.cli.progress import NOTICE_SECONDS, RECENT, Progress, Record
from polyreme.cli.report import duration, plain_line, shares_of, shortened, staleness_of
from polyreme.config.run import RunConfig

_TALL = 30
"""Lines of a terminal from which on it shows a sample too."""
_SPARKS = " " + "".join(chr(0x2581 + eighth) for eighth in range(8))
_SFT_LINE_SECONDS = 10.0
_LASTING = ("alarm", "eval_failed")


class View(Protocol):
    """Shows a run while it goes on. Use as a context manager."""

    def __enter__(self) -> "View": ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, record: Record, progress: Progress) -> None:
        """Shows a record that was added to `progress` just before."""

    def status(self, text: str) -> None:
        """Shows what the run is doing."""


def view(config: RunConfig, console: Console, redis_url: str = "") -> View:
    """The live view on a terminal that can redraw, plain lines elsewhere."""
    redraws = console.is_terminal and not console.is_dumb_terminal
    return LiveView(config, console, redis_url) if redraws else PlainView(config, console)


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

    def __init__(self, config: RunConfig, console: Console, redis_url: str = "") -> None:
        self._config, self._console, self._redis_url, self._status = config, console, redis_url, "starting"
        self._progress = Progress(config.samples_per_iteration)
        self._sample: Record | None = None
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
        if record["kind"] == "iteration":  # its own file may still be written
            self._sample = first_sample(self._config.run_dir, record["iteration"] - 1) or self._sample
        if record["kind"] in _LASTING and (line := plain_line(record, progress, self._config.iterations)):
            self._console.print(Text(line), style="bold red", soft_wrap=True)  # above the view, where it stays

    def _render(self) -> RenderableType:
        size, now = self._console.size, time.time()
        return render(self._config, self._progress, self._status, size, now, self._redis_url, self._sample)


def first_sample(run_dir: Path, iteration: int) -> Record | None:
    """The first sample of an iteration's file in samples/; None when there is no such file."""
    with suppress(FileNotFoundError, ValueError), open(run_dir / "samples" / f"iteration_{iteration:04d}.jsonl") as file:
        sample: Record = json.loads(file.readline())
        return sample
    return None


def _echo_keys(on: bool) -> None:
    with suppress(OSError, ValueError, termios.error):  # no terminal, or none any more
        terminal = sys.stdin.fileno()
        if os.tcgetpgrp(terminal) != os.getpgrp():
            return  # in the background it is not ours to set
        modes = termios.tcgetattr(terminal)
        modes[3] = modes[3] | termios.ECHO if on else modes[3] & ~termios.ECHO
        termios.tcsetattr(terminal, termios.TCSANOW, modes)


def render(
    config: RunConfig,
    progress: Progress,
    status: str,
    size: tuple[int, int] = (100, 40),
    now: float | None = None,
    redis_url: str = "",
    sample: Record | None = None,
) -> RenderableType:
    """The whole live view, drawn from the state, within `size` (columns, lines): every part but the table and the sample is one line.

    Args:
        now: Unix time; None: that of the newest record.
        redis_url: of the run's Redis.
        sample: a line of a sample file, for which a tall terminal has room.
    """
    width, height = size[0] - 4, size[1] - 3  # borders; the cursor's own line
    now = progress.time if now is None else now
    head = Text.assemble((config.name, "bold"), f"  {status}  ", (f"iteration {progress.newest}/{config.iterations}", "cyan"))
    if (score := progress.score()) is not None:
        head.append(f"  {progress.metric} {score:.3f} at version {max(progress.evaluations)}", "cyan")
    if progress.sft:
        sft = progress.sft
        head.append(f"  warm start {sft['phase']}: step {sft['step']}/{sft['steps']}  loss {sft['loss']:.3f}")
    bar = Table.grid()  # alone, a bar does not end its line
    bar.add_row(ProgressBar(total=config.iterations, completed=progress.newest, width=min(60, width)))
    parts: list[RenderableType] = [_line(head), bar]
    foot = _foot(progress, now, redis_url)
    if times := _times(config, progress, now):
        parts.append(_line(times))
    if rewards := [record["reward/mean"] for record in progress.recent]:
        sparks = sparkline(rewards[-min(60, max(1, width - 18)) :])
        parts.append(_line(f"reward   {sparks}  {rewards[-1]:.3f}", "green"))
        if len(by_part := progress.reward_parts()) > 1:
            parts.append(_line("parts    " + "  ".join(f"{name} {value:.3f}" for name, value in by_part.items()), "green"))
        if sample and size[1] >= _TALL:
            foot = _sample_lines(sample, width) + foot
        foot = foot[-max(1, height - len(parts) - 2) :]  # the table's header and newest row come first
        parts.append(_table(progress, min(RECENT, max(1, height - len(parts) - len(foot) - 1)), width))
    return Panel(Group(*parts, *foot), border_style="blue")


def _times(config: RunConfig, progress: Progress, now: float) -> str:
    """How long the run has been going since its newest start, how long it may still take, and what was restarted."""
    pieces = []
    if progress.started is not None:
        pieces.append(f"elapsed {duration(now - progress.started)}")
    if remaining := progress.remaining_seconds(config.iterations):
        pieces.append(f"remaining about {duration(remaining)}")
    if progress.starts > 1:
        pieces.append(f"resumed {progress.starts - 1}x")
    if progress.restarts:
        pieces.append("restarts " + " ".join(f"{name} {count}" for name, count in sorted(progress.restarts.items())))
    return "  ".join(pieces)


def _foot(progress: Progress, now: float, redis_url: str) -> list[RenderableType]:
    """Where things are, what was noticed lately, and the alarms that hold."""
    lines: list[RenderableType] = [_line(f"Redis    {redis_url}", "dim")] if redis_url else []
    there = {**dict.fromkeys(progress.replicas), **progress.versions}
    if there:
        shown = "  ".join(
            " ".join(filter(None, (name, "" if version is None else f"at {version}", progress.replicas.get(name, ""))))
            for name, version in sorted(there.items())
        )
        lines.append(_line(f"replicas {shown}", "dim"))
    lines += [_line(text, "dim") for at, text in progress.notices if now - at < NOTICE_SECONDS][-2:]
    holding = (progress.last or {}).get("alarms", ())
    alarms = [text for at, text in progress.alarms if text in holding or now - at < NOTICE_SECONDS]
    return lines + [_line(f"alarm: {alarm}", "bold red") for alarm in alarms[-3:]]


def _sample_lines(sample: Record, width: int) -> list[RenderableType]:
    """A training sample on three lines."""
    prompt, response = (shortened(str(sample[key]), max(20, width - 12)) for key in ("prompt", "response"))
    score = f"score    {sample['score']:g} in iteration {sample['iteration']}"
    return [_line(f"prompt   {prompt}", "dim"), _line(f"response {response}"), _line(score, "dim")]


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


def _table(progress: Progress, rows: int, width: int) -> Table:
    """The newest iterations, in as many columns as the width has room for."""
    shares = "wait/train/write" + ("/rollouts" if progress.rollout else "")
    lines = []
    for record in list(progress.recent)[-rows:]:
        number, mismatch = record["iteration"], record.get("mismatch_kl")
        score = progress.evaluations.get(number)
        lines.append(
            {
                "iteration": str(number),
                "reward": f"{record['reward/mean']:.3f}",
                progress.metric: "" if score is None else f"{score:.3f}",
                "length": f"{record['response_length/mean']:.1f}",
                "tokens/s": f"{record['tokens_per_second']:,.0f}",
                "seconds": f"{record['time/iteration']:.2f}",
                shares: shares_of(record, progress, names=False),
                "staleness": staleness_of(record).split()[-1] if staleness_of(record) else "",
                "mismatch": "" if mismatch is None else f"{mismatch:.1e}",
            }
        )
    columns = {
        name: max(len(name), *(len(line[name]) for line in lines)) for name in lines[0] if any(line[name] for line in lines)
    }
    for name in ("staleness", "mismatch", "length", shares, "tokens/s", "seconds", progress.metric):
        if sum(columns.values()) + 2 * len(columns) > width:
            columns.pop(name, None)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*(line[name] for name in columns))
    return table
