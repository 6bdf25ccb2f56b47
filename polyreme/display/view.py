"""The output of `polyreme up`: a live view on a terminal, one line per event elsewhere.

Invariant: both views read the same Progress and change nothing. Departed replicas and resolved alarms leave the live view.
"""

import json
import os
import sys
import termios
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyreme.config.run import RunConfig
from polyreme.display.report import activities, duration, engine_starting, plain_line, shares_of, shortened, staleness_of
from polyreme.experience.metric_records import EngineStart, Line, MetricRecord, ReplicasChanged, WarmStartStep, read_record
from polyreme.rundir.progress import NOTICE_SECONDS, RECENT, Progress
from polyreme.terminal.terminal import harmless

_TALL = 30
"""Minimum height in lines of a terminal that also shows a sample."""
_SPARKS = " " + "".join(chr(0x2581 + eighth) for eighth in range(8))
_SFT_LINE_SECONDS = 10.0
_LASTING = ("alarm", "eval_failed")


def view(config: RunConfig, console: Console, redis_url: str = "") -> "PlainView | LiveView":
    """The live view on a terminal that can redraw and has its characters, plain lines elsewhere."""
    redraws = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return LiveView(config, console, redis_url) if redraws else PlainView(config, console)


class PlainView:
    """Prints one line per iteration, evaluation, alarm and notice, and a line about the warm start every few seconds.

    Engines that end for the learner (`rollout.cpu_sleep: end`) start in every turn, at another address. Only the first start of
    each process is printed then: a second process is news, a second turn is not.
    """

    def __init__(self, config: RunConfig, console: Console) -> None:
        self._config, self._console = config, console
        self._sft_shown = float("-inf")
        self._started: set[tuple[str, int]] = set()  # host and process id

    def __enter__(self) -> "PlainView":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self, text: str) -> None:
        self._print(text)

    def show(self, line: Line, progress: Progress) -> None:
        record = read_record(line)
        if isinstance(record, WarmStartStep):
            if record.time - self._sft_shown < _SFT_LINE_SECONDS and record.step < record.steps:
                return
            self._sft_shown = record.time
        if self._config.ends_engines and self._repeats_turn(record):
            return
        if text := plain_line(line, progress, self._config.iterations):
            self._print(text)

    def _repeats_turn(self, record: MetricRecord | None) -> bool:
        """Whether the record reports what happens in every turn."""
        if not isinstance(record, EngineStart):
            return isinstance(record, ReplicasChanged)
        process = (record.host, record.pid)
        repeats = process in self._started
        if record.seconds is not None:
            self._started.add(process)
        return repeats

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """Redraws a panel four times per second."""

    def __init__(self, config: RunConfig, console: Console, redis_url: str = "") -> None:
        self._config, self._console, self._redis_url, self._status = config, console, redis_url, "starting"
        self._progress = Progress(config.samples_per_iteration)
        self._sample: Line | None = None
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> "LiveView":
        _echo_keys(False)  # echoed keys would move the view
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        _echo_keys(True)

    def status(self, text: str) -> None:
        self._status = text

    def show(self, line: Line, progress: Progress) -> None:
        self._progress = progress
        if line["kind"] == "iteration":  # this iteration's file may be incomplete
            self._sample = first_sample(self._config.run_dir, line["iteration"] - 1) or self._sample
        if line["kind"] in _LASTING and (text := plain_line(line, progress, self._config.iterations)):
            self._console.print(Text(harmless(text)), style="bold red", soft_wrap=True)  # printed above the view, where it stays

    def _render(self) -> RenderableType:
        size, now = self._console.size, time.time()
        return render(self._config, self._progress, self._status, size, now, self._redis_url, self._sample)


def first_sample(run_dir: Path, iteration: int) -> Line | None:
    """The first sample of an iteration's file in samples/, or None without such a file."""
    with suppress(FileNotFoundError, ValueError), open(run_dir / "samples" / f"iteration_{iteration:04d}.jsonl") as file:
        sample: Line = json.loads(file.readline())
        return sample
    return None


def _echo_keys(on: bool) -> None:
    with suppress(OSError, ValueError, termios.error):  # no terminal, or it has closed
        terminal = sys.stdin.fileno()
        if os.tcgetpgrp(terminal) != os.getpgrp():
            return  # a background process must not change the terminal
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
    sample: Line | None = None,
) -> RenderableType:
    """Renders the live view within `size` (columns, lines). Every part except the table and the sample is one line.

    Args:
        config: configuration of the run.
        progress: the state to show.
        status: text for the run's state.
        size: columns and lines of the terminal.
        now: Unix time in seconds. Default: the time of the newest record.
        redis_url: URL of the run's Redis.
        sample: a line of a sample file, shown on a tall terminal.
    """
    width, height = size[0] - 4, size[1] - 3  # without the borders and the cursor's line
    now = progress.time if now is None else now
    head = Text.assemble((config.name, "bold"), f"  {status}  ", (f"iteration {progress.newest}/{config.iterations}", "cyan"))
    if (score := progress.score()) is not None:
        head.append(f"  {progress.metric} {score:.3f} at version {max(progress.evaluations)}", "cyan")
    bar = Table.grid()  # a bare ProgressBar does not end its line
    bar.add_row(ProgressBar(total=max(1, config.iterations), completed=progress.newest, width=min(60, width)))
    parts: list[RenderableType] = [_line(head), bar]
    parts += [_line(f"now      {activity}", "cyan") for activity in activities(progress)]
    foot = _footer(progress, now, redis_url)
    if times := _times(config, progress, now):
        parts.append(_line(times))
    rewards = [record.metrics["reward/mean"] for record in progress.recent]
    if rewards:
        sparks = sparkline(rewards[-min(60, max(1, width - 18)) :])
        parts.append(_line(f"reward   {sparks}  {rewards[-1]:.3f}", "green"))
        if len(by_part := progress.reward_parts()) > 1:
            parts.append(_line("parts    " + "  ".join(f"{name} {value:.3f}" for name, value in by_part.items()), "green"))
    if height < len(parts) + (3 if rewards else len(foot)):  # no room for the table: the state and the newest of the foot
        parts, rewards, foot = parts[:1], [], foot[max(0, len(foot) + 1 - height) :]
    if rewards:
        if sample and size[1] >= _TALL:
            foot = _sample_lines(sample, width) + foot
        foot = foot[-max(1, height - len(parts) - 2) :]  # the table's header and newest row have priority
        parts.append(_table(progress, min(RECENT, max(1, height - len(parts) - len(foot) - 1)), width))
    whole = Group(*parts, *foot)
    return Panel(whole, border_style="blue") if height > 0 else whole


def _times(config: RunConfig, progress: Progress, now: float) -> str:
    """Elapsed time since the newest start, estimated remaining time, and restarts."""
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


def _footer(progress: Progress, now: float, redis_url: str) -> list[RenderableType]:
    """Redis, replicas, recent notices, and active alarms."""
    lines: list[RenderableType] = [_line(f"Redis    {redis_url}", "dim")] if redis_url else []
    there = {**dict.fromkeys(progress.replicas), **progress.versions}
    if there:
        shown = "  ".join(
            " ".join(filter(None, (name, "" if version is None else f"at {version}", progress.replicas.get(name, ""))))
            for name, version in sorted(there.items())
        )
        lines.append(_line(f"replicas {shown}", "dim"))
    elif progress.started is not None:
        engine, unknown = progress.engine_start, "none" if progress.newest else "starting"
        lines.append(_line(f"replicas {unknown if engine is None else engine_starting(engine, now)}", "dim"))
    lines += [_line(text, "dim") for at, text in progress.notices if now - at < NOTICE_SECONDS][-2:]
    holding = progress.last.alarms if progress.last else ()
    alarms = [text for at, text in progress.alarms if text in holding or now - at < NOTICE_SECONDS]
    return lines + [_line(f"alarm: {alarm}", "bold red") for alarm in alarms[-3:]]


def _sample_lines(sample: Line, width: int) -> list[RenderableType]:
    """A training sample as three lines."""
    prompt, response = (shortened(str(sample[key]), max(20, width - 12)) for key in ("prompt", "response"))
    score = f"score    {sample['score']:g} in iteration {sample['iteration']}"
    return [_line(f"prompt   {prompt}", "dim"), _line(f"response {response}"), _line(score, "dim")]


def _line(text: str | Text, style: str = "") -> Text:
    """Text that is truncated at the end of the line."""
    line = Text(harmless(text.replace("\n", " ")), style) if isinstance(text, str) else text
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def sparkline(values: Iterable[float]) -> str:
    """One character per value. Heights are relative to the largest value, or to 1 if that is larger."""
    heights = list(values)
    top = max([1.0, *heights])
    return "".join(_SPARKS[round(max(0.0, value) / top * (len(_SPARKS) - 1))] for value in heights)


def _table(progress: Progress, rows: int, width: int) -> Table:
    """A table of the newest iterations, with as many columns as fit the width."""
    shares = "wait/train/write" + ("/rollouts" if progress.rollout else "")
    lines = []
    for record in list(progress.recent)[-rows:]:
        number, metrics, mismatch = record.iteration, record.metrics, record.metrics.get("mismatch_kl")
        score = progress.evaluations.get(number)
        lines.append(
            {
                "iteration": str(number),
                "reward": f"{metrics['reward/mean']:.3f}",
                progress.metric: "" if score is None else f"{score:.3f}",
                "length": f"{metrics['response_length/mean']:.1f}",
                "tokens/s": f"{metrics['tokens_per_second']:,.0f}",
                "seconds": f"{metrics['time/iteration']:.2f}",
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
