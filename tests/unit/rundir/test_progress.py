"""Progress from records, and the text lines made of it."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polyreme.config.model import ModelConfig
from polyreme.config.trainer import ParallelConfig
from polyreme.display import view
from polyreme.display.report import activities, plain_line, replay, report
from polyreme.display.summary import redis_bytes, summary_lines
from polyreme.errors import ConfigError
from polyreme.experience.metric_records import read_record
from polyreme.rundir.evaluations import comparable
from polyreme.rundir.progress import LOADING_SECONDS, Progress
from support.configs import run_config
from support.record_lines import read_evaluation


def iteration(number: int, time: float, seconds: float = 2.0, wait: float = 1.0, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "iteration",
        "time": time,
        "iteration": number,
        "reward/mean": 0.25 * number,
        "response_length/mean": 9.5,
        "tokens_per_second": 5000.0,
        "time/iteration": seconds,
        "time/learner_wait": wait,
        "time/train": 0.5,
        "time/write": 0.1,
        "mismatch_kl": 1e-6,
        **fields,
    }


def evaluation(version: int, time: float, accuracy: float) -> dict[str, Any]:
    example = {"prompt": "a2b3=", "response": "b3+2=5#5", "label": "5", "score": 1.0}
    return {
        "kind": "eval",
        "time": time,
        "version": version,
        "accuracy": accuracy,
        "samples": 500,
        "seconds": 3.0,
        "examples": [example],
    }


def progress_of(*records: dict[str, Any]) -> Progress:
    progress = Progress(samples_per_iteration=256)
    for record in records:
        progress.add(record)
    return progress


def test_the_first_iteration_begins_when_the_evaluation_before_it_has_ended() -> None:
    progress = progress_of(evaluation(0, 100.0, 0.3), iteration(1, time=102.0, seconds=5.0, wait=4.0), iteration(2, time=104.0))
    assert progress.rl_seconds() == pytest.approx(4.0)
    assert progress.time_split()["waiting for samples"] == pytest.approx(2.0)
    assert sum(progress.time_split().values()) == pytest.approx(4.0)


def test_a_repeated_iteration_counts_once_and_its_rates_do_not() -> None:
    nonsense = iteration(2, time=5000.0, seconds=0.01, wait=0.0, tokens_per_second=69_484.0)
    progress = progress_of(iteration(1, time=10.0), iteration(2, time=12.0), nonsense, iteration(3, time=5002.0))
    assert progress.repeats(nonsense)
    assert progress.rl_seconds() == pytest.approx(6.0)
    assert progress.summary()["iterations"] == 3
    assert [record.metrics["tokens_per_second"] for record in progress.recent] == [5000.0] * 3


def test_a_replay_is_shown_with_its_place_and_the_time_that_it_adds() -> None:
    progress = progress_of(*(iteration(number, time=2.0 * number) for number in range(1, 91)))
    progress.add({"kind": "resumed", "time": 200.0, "iteration": 90})
    assert progress.replayed is None and not list(activities(progress)), "the checkpoint has everything"
    progress.add({"kind": "resumed", "time": 200.0, "iteration": 10})
    repeated = {**iteration(12, time=201.0), "repeated": True}
    progress.add(repeated)
    assert list(activities(progress)) == [replay(12, 90)]
    assert str(plain_line(repeated, progress, 120)).endswith(replay(12, 90))
    assert progress.remaining_seconds(120) == 2.0 * (120 - 12)
    progress.add(iteration(91, time=300.0))
    assert progress.replayed is None and not list(activities(progress))
    progress.add(repeated)
    progress.add({"kind": "start", "time": 301.0, "start": 3})
    assert progress.replayed is None, "the next start says from where it continues"


def test_a_long_run_s_progress_is_bounded() -> None:
    """Sums cover all iterations; records are kept only of the newest ones."""
    short, long = progress_of(*history(100)), progress_of(*history(3000))
    assert len(long.recent) == len(short.recent) < 100
    assert long.summary()["rl_seconds"] == 6000.0
    assert long.summary()["staleness"] == [9000, 3000]
    assert long.summary()["rollout_wait_seconds"] == 1500.0
    growth = len(pickle.dumps(long)) - len(pickle.dumps(short))
    assert growth < 2000, f"{growth} bytes more after 2,900 iterations more"


def history(iterations: int) -> Iterator[dict[str, Any]]:
    for number in range(1, iterations + 1):
        yield {"kind": "rollout", "time": 2.0 * number, "iteration": number, "time/rollout_wait": 0.5}
        yield {**iteration(number, time=2.0 * number), "staleness/samples": [3, 1]}
        yield {"kind": "commit", "time": 2.0 * number, "replica": "r0", "version": number}
        yield {"kind": "notice", "time": 2.0 * number, "service": "rollout", "text": "joined"}
        yield {"kind": "alarm", "time": 2.0 * number, "text": "constant reward"}


def test_what_is_gone_leaves() -> None:
    progress = progress_of(
        {"kind": "start", "time": 1.0, "start": 1, "forked_from": None},
        {"kind": "replicas", "time": 1.0, "replicas": {"r0": "http://a/v1", "r1": "http://b/v1"}},
        {"kind": "commit", "time": 2.0, "replica": "r0", "version": 0},
        {"kind": "commit", "time": 2.0, "replica": "r1", "version": 0},
        {"kind": "restart", "time": 3.0, "process": "learner", "text": "killed"},
        {"kind": "replicas", "time": 4.0, "replicas": {"r1": "http://b/v1"}},
    )
    assert (progress.versions, progress.replicas) == ({"r1": 0}, {"r1": "http://b/v1"})
    assert progress.restarts == {"learner": 1}
    progress.add({"kind": "start", "time": 5.0, "start": 2, "forked_from": None})
    assert (progress.versions, progress.replicas, progress.restarts) == ({}, {}, {})
    assert (progress.starts, progress.started) == (2, 5.0)


def test_the_time_that_is_left_follows_the_newest_iterations() -> None:
    assert progress_of().remaining_seconds(24) is None
    progress = progress_of(
        *(iteration(number, time=2.0 * number, seconds=100.0 if number < 5 else 2.0) for number in range(1, 25))
    )
    assert progress.remaining_seconds(34) == 20.0
    assert progress.remaining_seconds(24) == 0.0


def test_a_warm_start_says_how_long_its_phase_still_takes(tmp_path: Path) -> None:
    def step(number: int, at: float, phase: int = 1) -> dict[str, Any]:
        return {"kind": "sft", "phase": phase, "step": number, "steps": 50, "loss": 1.0, "tokens_per_second": 10.0, "time": at}

    progress = Progress(8)
    progress.add(step(10, 100.0))
    assert progress.sft_remaining_seconds() is None
    progress.add(step(20, 130.0))
    assert progress.sft_remaining_seconds() == pytest.approx(90.0)
    assert (plain_line(step(20, 130.0), progress, 1) or "").endswith("remaining about 1:30")
    progress.add(step(10, 140.0, phase=2))
    assert progress.sft_remaining_seconds() is None


def test_a_long_evaluation_says_how_far_it_is_until_it_is_over() -> None:
    begun = {"kind": "eval_progress", "version": 8, "answered": 120, "asked": 500, "seconds_left": 75.0, "time": 1.0}
    progress = progress_of(begun)
    assert progress.evaluating == read_record(begun)
    assert plain_line(begun, progress, 24) == "evaluation of version 8: 120 of 500 answers, remaining about 1:15"
    progress.add(evaluation(8, 2.0, 0.5))
    assert progress.evaluating is None
    progress.add(begun)
    progress.add({"kind": "eval_failed", "version": 8, "text": "why", "time": 3.0})
    assert progress.evaluating is None


def test_a_model_that_loads_is_shown_until_it_is_loaded() -> None:
    loading = {"kind": "loading", "role": "critic", "fraction": 0.25, "seconds_left": 75.0, "time": 1.0}
    progress = progress_of(loading)
    assert progress.loading == {"critic": read_record(loading)}
    assert plain_line(loading, progress, 24) == "loading the critic: 25%, remaining about 1:15"
    done = {"kind": "loading", "role": "critic", "fraction": 1.0, "seconds_left": 0.0, "time": 2.0}
    progress.add(done)
    assert not progress.loading and plain_line(done, progress, 24) == "loading the critic: 100%"
    progress.add(loading)
    progress.add({"kind": "restart", "process": "learner-0", "text": "why", "time": 3.0})
    assert not progress.loading


def test_models_that_load_at_once_are_shown_until_each_is_loaded() -> None:
    critic = {"kind": "loading", "role": "critic", "fraction": 0.25, "seconds_left": 75.0, "time": 1.0}
    reward = {**critic, "role": "reward model quality", "fraction": 0.5}
    progress = progress_of(critic, reward)
    assert list(activities(progress)) == [
        "loading the critic: 25%, remaining about 1:15",
        "loading the reward model quality: 50%, remaining about 1:15",
    ]
    progress.add({**critic, "fraction": 1.0, "time": 6.0})
    assert progress.loading == {"reward model quality": read_record(reward)}
    progress.add(iteration(1, time=1.0 + LOADING_SECONDS / 2))
    assert progress.loading == {"reward model quality": read_record(reward)}
    progress.add(iteration(2, time=1.0 + LOADING_SECONDS))  # its process is gone
    assert not progress.loading


def test_an_engine_that_starts_is_shown_until_a_replica_registers() -> None:
    begun = {"kind": "engine_start", "host": "a", "pid": 7, "engine": "vllm", "time": 1.0}
    over = {**begun, "engine": "vllm 0.32.0", "seconds": 18.24, "time": 19.3}
    progress = progress_of(begun)
    assert plain_line(begun, progress, 24) == "replica: vllm starts on a"
    assert plain_line(over, progress, 24) == "replica: vllm 0.32.0 started on a in 18.2 s"
    progress.add(over)
    assert progress.engine_start == read_record(over)
    progress.add({"kind": "replicas", "replicas": {}, "time": 19.5})
    assert progress.engine_start == read_record(over)
    progress.add({"kind": "replicas", "replicas": {"r": "http://a/v1"}, "time": 20.0})
    assert progress.engine_start is None
    progress.add(begun)
    progress.add({"kind": "restart", "process": "rollout-0", "text": "why", "time": 21.0})
    assert progress.engine_start is None


def test_a_mean_score_is_not_an_accuracy() -> None:
    scored = {**evaluation(0, 1.0, 0.0), "score": 1.3}
    del scored["accuracy"]
    progress = progress_of(scored, iteration(1, time=2.0), {**scored, "version": 1, "score": 1.5})
    assert (progress.summary()["score_before"], progress.summary()["score_after"]) == (1.3, 1.5)
    assert "accuracy_before" not in progress.summary()
    assert "accuracy" not in str(plain_line(scored, progress, 24))


def test_accuracy_before_and_after() -> None:
    progress = progress_of(evaluation(0, 1.0, 0.3), evaluation(8, 2.0, 0.7), evaluation(24, 3.0, 0.99))
    assert (progress.score(first=True), progress.score()) == (0.3, 0.99)
    assert progress_of(evaluation(0, 1.0, 0.3)).summary()["accuracy_after"] is None
    assert (
        progress_of(evaluation(0, 1.0, 0.3), iteration(1, time=2.0), evaluation(1, 3.0, 0.5)).summary()["accuracy_after"] == 0.5
    )
    assert (
        progress_of(evaluation(0, 1.0, 0.3), iteration(1, time=2.0)).summary()["accuracy_after"] is None
    )  # version 1 was not evaluated
    assert Progress(1).summary()["accuracy_before"] is None


def test_results_of_different_metrics_are_not_compared() -> None:
    hard = {**evaluation(2, 4.0, 0.9), "result": {"metric": "hard/pass@8", "value": 0.1}}
    progress = progress_of(evaluation(0, 1.0, 0.3), iteration(1, time=2.0), iteration(2, time=3.0), hard)
    assert (progress.metric, progress.evaluations) == ("hard/pass@8", {2: 0.1})
    assert (progress.summary()["hard/pass@8_before"], progress.summary()["hard/pass@8_after"]) == (None, 0.1)
    progress.add(evaluation(3, 5.0, 0.4))
    assert (progress.metric, progress.evaluations) == ("accuracy", {3: 0.4})


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("accuracy", "score", True),
        ("hard/score", "hard/accuracy", True),
        ("hard/score", "accuracy", False),
        ("reward/accuracy", "reward/score", False),
        ("hard/pass@8", "hard/pass@4", False),
    ],
)
def test_the_mean_of_a_set_has_two_names(one: str, other: str, same: bool) -> None:
    first, second = (read_evaluation({"result": {"metric": name, "value": 0.5}, "held_out": "a1"}) for name in (one, other))
    assert comparable(first, second) is same


def test_results_on_other_held_out_data_are_not_compared() -> None:
    first, second, third = (
        evaluation(version, 1.0 + version, value) | {"held_out": digest}
        for version, value, digest in ((0, 0.3, "a1"), (2, 0.9, "a1"), (4, 0.4, "b2"))
    )
    trained = [iteration(number, time=1.5 + number) for number in (1, 2, 3, 4)]
    progress = progress_of(first, *trained, second, third)
    assert (progress.metric, progress.evaluations) == ("accuracy", {4: 0.4})
    assert (progress.summary()["accuracy_before"], progress.summary()["accuracy_after"]) == (None, 0.4)


def test_a_record_that_does_not_name_its_prompts_is_comparable() -> None:
    older, newer = evaluation(0, 1.0, 0.3), evaluation(1, 3.0, 0.5) | {"held_out": "a1"}
    one, other = read_evaluation(older), read_evaluation(newer)
    assert comparable(one, other) and comparable(other, one)
    assert progress_of(older, iteration(1, time=2.0), newer).evaluations == {0: 0.3, 1: 0.5}


def test_the_summary_has_the_metrics_of_every_set() -> None:
    progress = progress_of(evaluation(0, 1.0, 0.3), {**evaluation(8, 2.0, 0.5), "hard/accuracy": 0.2, "hard/reward/exact": 0.1})
    newest = {"version": 8, "accuracy": 0.5, "hard/accuracy": 0.2, "hard/reward/exact": 0.1}
    assert progress.summary()["newest_evaluation"] == newest


def test_kinds_of_a_later_release_change_nothing() -> None:
    assert progress_of({"kind": "from the future", "time": 1.0}) == Progress(samples_per_iteration=256)


def test_one_line_per_iteration(tmp_path: Path) -> None:
    record = iteration(3, time=10.0, alarms=["constant reward"])
    progress = progress_of({"kind": "commit", "time": 9.0, "replica": "r0", "version": 2}, evaluation(0, 1.0, 0.3), record)
    line = plain_line(record, progress, iterations=24)
    assert line == (
        "iteration  3/24  reward 0.750  accuracy 0.300  length 9.5  tokens/s 5,000  2.00 s (wait 50% train 25% write 5%)  r0@2"
        "  ALARM"
    )


def test_an_asynchronous_iteration_shows_its_staleness_and_both_waits(tmp_path: Path) -> None:
    before: dict[str, Any] = {"staleness/samples": [250, 6]}
    stale: dict[str, Any] = {"staleness/samples": [100, 150, 6], "mismatch_kl": None}
    progress = progress_of(
        {"kind": "rollout", "time": 8.0, "iteration": 2, "time/rollout_wait": 0.0},
        {"kind": "rollout", "time": 10.0, "iteration": 3, "time/rollout_wait": 0.5},
        iteration(2, time=8.0, **before),
        record := iteration(3, time=10.0, **stale),
    )
    line = plain_line(record, progress, iterations=24)
    assert line is not None
    assert "(wait 50% train 25% write 5% rollouts wait 25%)  staleness 100/150/6" in line
    summary = progress.summary()
    assert summary["staleness"] == [350, 156, 6]
    assert (summary["rollout_wait_seconds"], summary["mismatch_kl_max"]) == (0.5, 1e-6)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(view.render(run_config(tmp_path), progress, "running"))
        assert "100/150/6" in console.export_text()


def test_the_replicas_wait_is_a_share_of_the_time_in_which_it_was_measured() -> None:
    """The time between two plans is not that of the learner's iteration, which may be shorter."""
    plans = [{"kind": "rollout", "time": 3.0 * number, "iteration": number, "time/rollout_wait": 2.4} for number in (1, 2, 3)]
    progress = progress_of(*plans)
    assert "rollouts wait 80%" in str(plain_line(iteration(3, time=10.0, seconds=1.5), progress, 24))
    assert "rollouts" not in str(plain_line(iteration(1, time=4.0), progress, 24)), "there is no plan before the first"
    assert progress.summary()["rollout_wait_seconds"] == pytest.approx(7.2)
    progress.add({"kind": "start", "time": 500.0, "start": 2})
    progress.add({"kind": "rollout", "time": 510.0, "iteration": 4, "time/rollout_wait": 9.0})
    assert progress.rollout_wait(4) is None


def test_an_alarm_is_shown_once() -> None:
    alarm = {"kind": "alarm", "time": 9.0, "text": "constant reward"}
    progress = progress_of(
        alarm, iteration(3, time=10.0, alarms=["constant reward"]), iteration(4, time=12.0, alarms=["constant reward"])
    )
    assert progress.summary()["alarms"] == ["constant reward"]
    assert plain_line(alarm, progress, 24) == "ALARM constant reward"


def test_the_live_view_and_the_report_show_what_matters(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    progress = progress_of(
        {"kind": "commit", "time": 1.0, "replica": "r0", "version": 2},
        evaluation(0, 1.0, 0.3),
        iteration(1, time=3.0),
        evaluation(1, 4.0, 0.95),
        {"kind": "saved", "time": 5.0, "iteration": 1, "path": "checkpoints/1", "hf_path": "hf/iteration_1"},
    )
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(view.render(config, progress, "running"))
        shown = console.export_text()
    for piece in ("running", "r0 at 2", "0.950", "5,000", "1.0e-06"):
        assert piece in shown
    text = "\n".join(report(config, progress, config.run_dir))
    for piece in (
        "0.300 before, 0.950 after",
        "1  a2b3= -> b3+2=5#5  (right: 5)",
        "training 25%",
        str(config.run_dir),
        "hf/iteration_1",
    ):
        assert piece in text


def test_a_sparkline_is_flat_at_nothing_and_full_at_one() -> None:
    assert view.sparkline([0.0, 1.0]) == " " + chr(0x2588)
    assert view.sparkline([]) == ""


def test_the_plan_names_what_a_run_will_do(tmp_path: Path) -> None:
    config = run_config(tmp_path, iterations=24, eval_interval=8)
    config = config.model_copy(update={"data": config.data.model_copy(update={"eval": tmp_path / "eval.jsonl"})})
    text = "\n".join(summary_lines(config))
    assert "24 of 4 prompts x 2 samples = 96 groups, 192 samples" in text
    assert "500 held-out prompts before iteration 1 and after iteration 8, 16, 24" in text
    assert "saves          every 10 minutes and after iteration 24" in text
    assert "constant 0.001" in text
    assert "asynchrony" not in text
    assert "trainer        tensor 1 x data 1 on cpu, float32" in text
    trainer = config.trainer.model_copy(update={"parallel": ParallelConfig(tensor=2, data=4, nodes=2)})
    assert "tensor 2 x data 4 over 2 machines on cpu" in "\n".join(summary_lines(config.model_copy(update={"trainer": trainer})))
    assert "up to 2 iterations behind" in "\n".join(summary_lines(config.model_copy(update={"max_staleness": 2})))


def test_redis_must_hold_what_the_oldest_kept_checkpoint_may_replay(tmp_path: Path) -> None:
    config = run_config(tmp_path, iterations=100)
    every_ten = config.model_copy(update={"trainer": config.trainer.model_copy(update={"save_interval": 10})})
    assert redis_bytes(config) == pytest.approx(redis_bytes(every_ten) * 101 / 31)


@pytest.mark.parametrize(("experts", "each"), [({"num_experts": 256}, 24 * 4), ({"num_local_experts": 257}, 2 * 24 * 4)])
def test_redis_must_hold_the_replayed_routes(experts: dict[str, int], each: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 24, "num_experts_per_tok": 4, **experts}))
    plain = run_config(tmp_path, model=ModelConfig(path=model))
    moe = plain.trainer.moe.model_copy(update={"replay_routes": True})
    replayed = plain.model_copy(update={"trainer": plain.trainer.model_copy(update={"moe": moe})})
    held = plain.iterations + 1 + plain.max_staleness
    tokens = plain.samples_per_iteration * plain.rollout.max_new_tokens * held
    assert redis_bytes(replayed) - redis_bytes(plain) == tokens * each
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 24}))
    with pytest.raises(ConfigError) as error:
        redis_bytes(replayed)
    assert "num_local_experts" in error.value.found
