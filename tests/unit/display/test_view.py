"""The views of a run fit the terminal for any records, and do not show unknown values as known."""

import io
import shlex
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from polyreme.config.run import RunConfig
from polyreme.display import view
from polyreme.display.report import plain_line, report
from polyreme.experience.run import RunState
from polyreme.rundir.progress import Progress
from support.configs import run_config


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = run_config(tmp_path, iterations=40)
    return config.model_copy(update={"data": config.data.model_copy(update={"eval": tmp_path / "eval.jsonl"})})


def test_the_view_says_how_far_an_evaluation_is(config: RunConfig) -> None:
    progress = Progress(8)
    progress.add({"kind": "eval_progress", "version": 8, "answered": 1, "asked": 5, "seconds_left": 75.0, "time": 1.0})
    console = Console(file=io.StringIO(), width=160, height=40)
    console.print(view.render(config, progress, "running", (160, 40)))
    assert "evaluates version 8: 1 of 5 answers" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_view_says_what_starts_and_for_how_long(config: RunConfig) -> None:
    progress = progress_of(
        {"kind": "start", "start": 1, "time": 1.0},
        {"kind": "loading", "role": "actor", "fraction": 0.25, "seconds_left": 75.0, "time": 26.0},
    )
    console = Console(file=io.StringIO(), width=160, height=40)
    console.print(view.render(config, progress, "starting", (160, 40), now=27.0))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loading the actor: 25%, remaining about 1:15" in shown
    assert "elapsed 0:26" in shown and "replicas starting" in shown
    narrow = Console(file=io.StringIO(), width=64, height=14)
    narrow.print(view.render(config, progress, "starting", (64, 14), now=27.0))
    assert "loading the actor: 25%, remaining about 1:15" in narrow.file.getvalue()  # type: ignore[attr-defined]
    progress.add({"kind": "engine_start", "host": "a", "pid": 7, "engine": "vllm", "time": 15.0})
    console.print(view.render(config, progress, "starting", (160, 40), now=27.0))
    assert "replicas vllm starts on a, for 0:12" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_engine_that_ends_in_every_turn_is_reported_once_per_process(config: RunConfig) -> None:
    begun = {"kind": "engine_start", "host": "a", "pid": 7, "engine": "vllm", "time": 1.0}
    turn = [begun, {**begun, "seconds": 2.0}, {"kind": "replicas", "replicas": {"r": "http://a/v1"}, "time": 2.0}]
    restarted = [{**record, "pid": 8} for record in turn[:2]]

    def printed(cpu_sleep: Literal["pause", "end"]) -> list[str]:
        rollout = config.rollout.model_copy(update={"cpu_sleep": cpu_sleep})
        changed = config.model_copy(update={"placement": "colocated", "rollout": rollout})
        plain = view.PlainView(changed, Console(file=(output := io.StringIO()), width=160))
        for record in (*turn, *turn, *restarted):
            plain.show(record, progress_of())
        return output.getvalue().splitlines()

    assert printed("end") == ["replica: vllm starts on a", "replica: vllm started on a in 2.0 s"] * 2
    assert len(printed("pause")) == 8


def iteration(number: int) -> dict[str, Any]:
    rates = {"reward/mean": number / 40, "response_length/mean": 90.5, "tokens_per_second": 15000.0, "mismatch_kl": 1e-6}
    return {"kind": "iteration", "time": 2.0 * number, "iteration": number, "time/iteration": 2.0, **rates}


def evaluation(version: int, accuracy: float, **example: Any) -> dict[str, Any]:
    example = {"prompt": "p", "response": "r", "label": "l", "score": 1.0, **example}
    return {
        "kind": "eval",
        "time": 1.0,
        "version": version,
        "accuracy": accuracy,
        "samples": 1,
        "seconds": 1.0,
        "examples": [example],
    }


def progress_of(*records: dict[str, Any]) -> Progress:
    progress = Progress(samples_per_iteration=8)
    for record in records:
        progress.add(record)
    return progress


@pytest.mark.parametrize("size", [(100, 30), (80, 24), (50, 12)])
def test_the_view_stays_within_the_terminal(config: RunConfig, size: tuple[int, int]) -> None:
    long = "a notice that is much longer than the terminal is wide, " * 3 + "\nand has lines"
    progress = progress_of(
        *[{"kind": "commit", "time": 1.0, "replica": f"rollout-a-host-of-some-name-{n}", "version": 2} for n in range(4)],
        *[{"kind": "notice", "time": 1.0, "service": "orchestrator", "text": long} for _ in range(3)],
        *[iteration(number) for number in range(1, 31)],
        {"kind": "alarm", "time": 9.0, "text": long},
    )
    console = Console(file=io.StringIO(), width=size[0], height=size[1])
    with console.capture() as captured:
        console.print(view.render(config, progress, "running", console.size))
    lines = captured.get().splitlines()
    assert len(lines) < size[1]
    assert all(len(line) <= size[0] for line in lines)
    assert any(line.split()[1:3] == ["30", "0.750"] for line in lines)


@pytest.mark.parametrize("trained", [0, 30])
@pytest.mark.parametrize("columns", [8, 20, 80])
def test_the_view_stays_within_a_terminal_of_few_lines(config: RunConfig, columns: int, trained: int) -> None:
    progress = progress_of(
        {"kind": "start", "start": 1, "time": 1.0},
        *[{"kind": "notice", "time": 9.0, "service": "orchestrator", "text": "a notice"} for _ in range(3)],
        *[iteration(number) for number in range(1, trained + 1)],
        *[{"kind": "alarm", "time": 9.0, "text": f"slow {number}"} for number in range(3)],
    )
    for height in range(2, 14):
        lines = shown(config, progress, (columns, height), now=10.0).splitlines()
        assert len(lines) < height and all(len(line) <= columns for line in lines), height
        assert any("run" in line for line in lines) and (height < 5 or any("slow 2" in line or columns == 8 for line in lines)), (
            height
        )


def test_the_accuracy_before_training_is_seen(config: RunConfig) -> None:
    console = Console(file=io.StringIO(), width=80, height=24)
    with console.capture() as captured:
        console.print(view.render(config, progress_of(evaluation(0, 0.3)), "running"))
    assert "accuracy 0.300 at version 0" in captured.get()


@pytest.mark.parametrize(("term", "kind"), [("xterm", view.LiveView), ("dumb", view.PlainView)])
def test_only_a_terminal_that_redraws_gets_the_view(config: RunConfig, term: str, kind: type) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": term})
    assert isinstance(view.view(config, console), kind)


def test_a_terminal_without_the_views_characters_gets_lines(config: RunConfig) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="iso-8859-1")
    assert isinstance(view.view(config, Console(file=output, force_terminal=True, _environ={"TERM": "xterm"})), view.PlainView)


def test_an_alarm_stays_above_the_view(config: RunConfig) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=20)
    with view.LiveView(config, console) as shown:
        alarm = {"kind": "alarm", "time": 9.0, "text": "constant reward: " + "why " * 30}
        shown.show(alarm, progress_of(alarm))
    assert isinstance(console.file, io.StringIO)
    assert "why " * 30 in console.file.getvalue()


COMMANDS = "a\x1b[2J\x9b1A \u202ecba"
"""Clears a terminal, moves up and reorders what follows."""
HARMLESS = "a\\x1b[2J\\x9b1A \\u202ecba"


def test_texts_in_the_view_command_nothing(config: RunConfig) -> None:
    told = {"time": 2.0, "text": COMMANDS, "service": "rollout"}
    progress = progress_of(iteration(1), {"kind": "notice", **told}, {"kind": "alarm", **told})
    sample = {"iteration": 1, "prompt": COMMANDS, "response": COMMANDS, "score": 1.0}
    text = shown(config, progress, (120, 50), sample=sample)
    assert text.count(HARMLESS) == 2 and not {"\x1b", "\x9b", "\u202e"} & set(text)


def test_an_alarm_above_the_view_commands_nothing(config: RunConfig) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=20)
    with view.LiveView(config, console) as shown:
        shown.show({"kind": "alarm", "text": COMMANDS, "time": 1.0}, Progress(8))
    assert HARMLESS in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_version_without_evaluation_has_no_result(config: RunConfig) -> None:
    failed = {"kind": "eval_failed", "time": 2.0, "version": 2, "text": "version 2 could not be evaluated: no scores"}
    progress = progress_of(evaluation(0, 0.3), iteration(1), iteration(2), failed)
    [line] = [line for line in report(config, progress, config.run_dir) if "accuracy" in line]
    assert "0.300 before; UNKNOWN after 2 iterations" in line and "no scores" in line
    assert plain_line(failed, progress, 40) == "EVALUATION FAILED: version 2 could not be evaluated: no scores"
    assert progress.summary()["accuracy_after"] is None
    assert progress.summary()["failed_evaluations"] == {"2": failed["text"]}
    progress.add(evaluation(2, 0.9))
    assert "0.300 before, 0.900 after" in report(config, progress, config.run_dir)[0]
    why = "stop requested: 1 of 40 iterations are trained"
    stopped = report(config, progress_of(evaluation(0, 0.3), iteration(1)), config.run_dir, RunState.STOPPED, why)
    assert stopped[0].split(maxsplit=1) == ["stopped", why]
    assert "0.300 before; version 1 was not evaluated" in stopped[1]
    between = progress_of(evaluation(0, 0.3), *(iteration(number) for number in range(1, 6)), evaluation(4, 0.5))
    stopped = report(config, between, config.run_dir, RunState.STOPPED, why)
    assert "0.300 before, 0.500 after iteration 4; version 5 was not evaluated" in stopped[1]


def test_the_last_lines_can_be_pasted_where_a_path_has_spaces(config: RunConfig) -> None:
    saved = {"kind": "saved", "time": 5.0, "iteration": 1, "path": "a b/1", "hf_path": "a b/hf"}
    held_out = config.model_copy(update={"data": config.data.model_copy(update={"eval": Path("eval.jsonl")})})
    run_dir = Path("/a b/run")
    lines = report(held_out, progress_of(iteration(1), saved), run_dir)
    commands = [shlex.split(line.removeprefix("next"), comments=True) for line in lines if " polyreme " in line]
    assert ["polyreme", "chat", "/a b/run"] in commands
    assert ["polyreme", "eval", "/a b/run/config.yaml", "--model", "a b/hf"] in commands
    assert all("b/run" not in command for command in commands)


def test_the_last_lines_name_what_remains_after_the_run(config: RunConfig) -> None:
    """The page of `up` ends with it."""
    held_out = config.model_copy(update={"data": config.data.model_copy(update={"eval": Path("eval.jsonl")})})
    saved = {"kind": "saved", "time": 5.0, "iteration": 1, "path": "checkpoints/1", "hf_path": "hf/1"}
    text = "\n".join(report(held_out, progress_of(iteration(1), saved), config.run_dir))
    folder = config.run_dir
    for command in ("ui", "chat", "samples"):
        assert f"polyreme {command} {folder}" in text
    assert f"polyreme eval {folder / 'config.yaml'} --model hf/1" in text
    stopped = "\n".join(report(config, progress_of(iteration(1), saved), folder, RunState.STOPPED, "stop requested"))
    assert f"polyreme ui {folder}" in stopped and "--resume" in stopped and "polyreme eval" not in stopped
    failed = report(config, progress_of(iteration(1)), folder, RunState.FAILED, "no disk")
    assert "polyreme logs" in failed[-1]


def test_sample_answers_are_one_line_each(config: RunConfig) -> None:
    example = {"prompt": "word " * 500, "response": "a\nb\x1b[31m\tc", "label": "l"}
    lines = report(config, progress_of(evaluation(0, 0.3), iteration(1), evaluation(1, 0.5, **example)), config.run_dir)
    assert " -> a b [31m c  (right: l)" in lines[1]
    assert len(lines[1]) < 300


def shown(config: RunConfig, progress: Progress, size: tuple[int, int] = (120, 40), **facts: Any) -> str:
    console = Console(file=io.StringIO(), width=size[0], height=size[1])
    with console.capture() as captured:
        console.print(view.render(config, progress, "running", console.size, **facts))
    return captured.get()


def test_places_times_parts_and_restarts_are_seen(config: RunConfig) -> None:
    parts = {"reward/exact": 0.25, "reward/shape": 0.5}
    progress = progress_of(
        {"kind": "start", "time": 0.0, "start": 2, "forked_from": None},
        {"kind": "replicas", "time": 1.0, "replicas": {"r0": "http://127.0.0.1:20001/v1"}},
        {"kind": "restart", "time": 1.0, "process": "rollout-0", "text": "killed"},
        {**iteration(10), **parts},
    )
    text = shown(config, progress, now=125.0, redis_url="redis://127.0.0.1:20002/0")
    for piece in (
        "redis://127.0.0.1:20002/0",
        "r0 http://127.0.0.1:20001/v1",
        "elapsed 2:05",
        "remaining about 1:00",
        "resumed 1x",
        "restarts rollout-0 1",
        "exact 0.250  shape 0.500",
    ):
        assert piece in text


def test_old_warnings_leave_and_an_alarm_that_holds_stays(config: RunConfig) -> None:
    progress = progress_of(
        {"kind": "notice", "time": 1.0, "service": "rollout", "text": "a replica left"},
        {"kind": "alarm", "time": 2.0, "text": "constant reward"},
        {**iteration(1), "alarms": ["constant reward"]},
    )
    assert "a replica left" in shown(config, progress, now=200.0)
    later = shown(config, progress, now=2000.0)
    assert "a replica left" not in later
    assert "constant reward" in later
    progress.add({**iteration(2), "alarms": []})
    assert "constant reward" not in shown(config, progress, now=2000.0)


def test_a_tall_terminal_shows_a_sample_and_more_iterations(config: RunConfig) -> None:
    progress = progress_of(*[iteration(number) for number in range(1, 41)])
    sample = {"iteration": 39, "prompt": "a2b3=", "response": "b3+2=5\n#5", "score": 1.0}
    tall, low = (shown(config, progress, size, sample=sample) for size in ((120, 50), (120, 24)))
    assert "b3+2=5 #5" in tall and "score    1 in iteration 39" in tall
    assert "b3+2=5" not in low
    assert len(tall.splitlines()) < 50
    assert sum(line.count("2.00") for line in tall.splitlines()) > 12


def test_the_sample_is_of_the_newest_file_that_is_there(config: RunConfig) -> None:
    (config.run_dir / "samples").mkdir(parents=True)
    (config.run_dir / "samples" / "iteration_0003.jsonl").write_text('{"iteration": 3, "response": "r"}\n{"iteration": 3}\n')
    assert view.first_sample(config.run_dir, 3) == {"iteration": 3, "response": "r"}
    assert view.first_sample(config.run_dir, 4) is None
