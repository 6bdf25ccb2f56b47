"""The reader of run directories: metrics, events, samples, and reads while a run writes."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from polyreme.errors import ConfigError, UnavailableError
from polyreme.rundir.reader import RunReader, SampleQuery, run_directories
from polyreme.rundir.reader.index import Index
from polyreme.rundir.reader.index_rows import sample_row
from polyreme.rundir.reader.run import INDEX
from polyreme.rundir.run_records import read_records

RUN = "sorting-1"


def sample(iteration: int, group: int, position: int, **fields: Any) -> dict[str, Any]:
    """A line of a sample file."""
    return {
        "iteration": iteration, "group": group, "attempt": 1, "sample": position, "prompt": f"Sort {group % 3}", "label": "a b",
        "response": f"answer {group}.{position}", "score": float(position), "tokens": 3 + position, "finish_reason": "stop",
        "parts": {"exact": {"raw": float(position), "weighted": float(position)}}, "spans": [[iteration - 1, 0, 3 + position]],
        **fields,
    }  # fmt: skip


def write(run_dir: Path, records: Sequence[Mapping[str, Any]], run: str = RUN) -> None:
    """Appends records to the run's metrics.jsonl."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "run.json").write_text(json.dumps({"run_id": run, "redis": "embedded"}))
    with open(run_dir / "metrics.jsonl", "a") as file:
        for record in records:
            file.write(json.dumps({"run": run, "id": "1-0", "time": 100.0, **record}) + "\n")


def write_samples(run_dir: Path, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
    (run_dir / "samples").mkdir(exist_ok=True)
    (run_dir / "samples" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three iterations of two groups of two samples, and an evaluation."""
    folder = tmp_path / "sorting"
    write(folder, [{"kind": "start", "start": 1, "forked_from": None}])
    for iteration in (1, 2, 3):
        groups = (2 * iteration, 2 * iteration + 1)
        lines = [sample(iteration, group, position) for group in groups for position in (0, 1)]
        write_samples(folder, f"iteration_{iteration:04d}.jsonl", lines)
        write(folder, [{"kind": "iteration", "iteration": iteration, "reward/mean": iteration / 4, "time": 100.0 + iteration}])
    answer = {"version": 3, "row": 0, "prompt": "Sort 9", "response": "held out", "label": "z", "score": 1.0}
    write_samples(folder, "evaluation_0003.jsonl", [answer])
    write(folder, [{"kind": "eval", "version": 3, "accuracy": 1.0}, {"kind": "alarm", "text": "rewards are constant"}])
    return folder


@pytest.fixture
def reader(run_dir: Path) -> RunReader:
    found = RunReader(run_dir)
    found.refresh()
    return found


def test_metrics_are_series_over_their_steps(reader: RunReader) -> None:
    assert reader.contents().iterations == 3 and reader.contents().samples == 13
    assert {"reward/mean", "accuracy", "time"} <= set(reader.contents().metrics)
    steps, values = reader.series("reward/mean")
    assert steps.tolist() == [1, 2, 3] and values.tolist() == [0.25, 0.5, 0.75]
    assert len(reader.series("no such metric")[0]) == 0


def test_events_are_the_other_records(reader: RunReader) -> None:
    assert [event["kind"] for event in reader.events()] == ["start", "eval", "alarm"]
    [alarm] = reader.events(["alarm"])
    assert alarm["text"] == "rewards are constant"


def test_samples_are_found_by_every_filter(reader: RunReader) -> None:
    def ids(**wanted: Any) -> list[str]:
        total, found = reader.find_samples(SampleQuery(**wanted))
        assert total == len(found)
        return [each["id"] for each in found]

    assert ids(kind="train", first=2, last=2, order="oldest") == ["4.0", "4.1", "5.0", "5.1"]
    assert ids(kind="eval") == ["v3.0"]
    assert ids(score_min=0.5, kind="train", order="oldest") == ["2.1", "3.1", "4.1", "5.1", "6.1", "7.1"]
    assert ids(text="ANSWER 6.1") == ["6.1"]
    assert ids(text="held") == ["v3.0"]
    assert ids(text="sort 9") == ["v3.0"]
    assert ids(kind="train", tokens_max=3, first=3) == ["6.0", "7.0"]
    assert ids(text="100%_") == []
    [[prompt]] = [{each["prompt_number"] for each in reader.find_samples(SampleQuery(text="Sort 2"))[1]}]
    assert ids(prompt=prompt, order="oldest") == ["2.0", "2.1", "5.0", "5.1"]


def test_pages_of_samples_follow_each_other(reader: RunReader) -> None:
    everything = SampleQuery(order="oldest")
    total, first = reader.find_samples(everything, limit=8)
    _, rest = reader.find_samples(everything, offset=8, limit=8)
    assert total == 13 and len({each["id"] for each in first + rest}) == 13


def test_one_sample_has_all_that_its_line_says(reader: RunReader) -> None:
    found = reader.sample("5.1")
    assert found is not None
    assert found["step"] == 2 and found["spans"] == [[1, 0, 4]] and found["parts"]["exact"] == {"raw": 1.0, "weighted": 1.0}
    assert reader.sample("5.2") is None


def test_every_answer_to_a_prompt_of_an_evaluation_is_a_sample(run_dir: Path, reader: RunReader) -> None:
    answer = {"version": 4, "row": 0, "prompt": "Sort 9", "label": "z", "score": 1.0}
    write_samples(run_dir, "evaluation_0004.jsonl", [{**answer, "answer": n, "response": f"try {n}"} for n in range(3)])
    write(run_dir, [{"kind": "eval", "version": 4, "accuracy": 1.0}])
    reader.refresh()
    found = reader.read_samples(SampleQuery(kind="eval", first=4, order="oldest"))
    assert [line["response"] for line in found] == ["try 0", "try 1", "try 2"]
    assert reader.sample("v4.0.2") is not None


def test_what_a_run_writes_later_is_added_once(run_dir: Path, reader: RunReader) -> None:
    assert not reader.refresh()
    write_samples(run_dir, "iteration_0004.jsonl", [sample(4, 8, 0)])
    assert not reader.refresh(), "a sample file counts when its iteration is recorded"
    write(run_dir, [{"kind": "iteration", "iteration": 4, "reward/mean": 1.0}])
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"kind": "iteration", "iterat')  # still being written
    assert reader.refresh() and not reader.refresh()
    assert reader.contents().iterations == 4 and reader.sample("8.0") is not None
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(f'ion": 5, "run": "{RUN}", "time": 1.0}}\n')
    assert reader.refresh() and reader.contents().iterations == 5


def test_another_run_in_the_directory_replaces_the_index(run_dir: Path, reader: RunReader) -> None:
    (run_dir / "metrics.jsonl").unlink()
    write(run_dir, [{"kind": "iteration", "iteration": 1, "reward/mean": 0.0}], run="sorting-2")
    reader.refresh()
    assert reader.run_id == "sorting-2" and reader.contents().iterations == 1
    assert reader.find_samples(SampleQuery(first=2))[0] == 0


def test_an_index_of_another_schema_is_rebuilt(run_dir: Path, reader: RunReader) -> None:
    connection = sqlite3.connect(run_dir / INDEX)
    connection.execute("UPDATE meta SET value = '0' WHERE key = 'schema'")
    connection.execute("DELETE FROM sample")
    connection.commit()
    connection.close()
    assert reader.refresh() and reader.sample("5.1") is not None


def test_an_index_that_another_file_replaces_is_rebuilt(run_dir: Path, reader: RunReader) -> None:
    index = run_dir / INDEX
    reader.refresh()
    before = index.stat().st_ctime_ns
    index.write_bytes(b"")  # like a deleted file whose inode is reused
    while index.stat().st_ctime_ns == before:  # the clock of the file system is coarse
        index.touch()
    assert reader.contents().samples == 0
    assert reader.refresh() and reader.contents().samples == 13


def test_an_unchanged_index_is_not_opened(reader: RunReader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.refresh()
    reader.contents()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(sqlite3, "connect", refuse)
    assert not reader.refresh() and reader.contents().iterations == 3


@pytest.mark.parametrize("line", [b"{garbage", b"\xff\x00", b"3"])
def test_a_damaged_record_is_refused_by_name(run_dir: Path, line: bytes) -> None:
    with open(run_dir / "metrics.jsonl", "ab") as file:
        file.write(line + b"\n")
    for read in (RunReader(run_dir).refresh, lambda: list(read_records(run_dir, RUN))):
        with pytest.raises(ConfigError) as raised:
            read()
        assert "metrics.jsonl" in raised.value.expected


@pytest.mark.parametrize("content", [None, b"", b"{" * 10_000])
def test_a_sample_file_that_has_changed_is_refused_by_name(run_dir: Path, reader: RunReader, content: bytes | None) -> None:
    path = run_dir / "samples" / "iteration_0002.jsonl"
    path.unlink() if content is None else path.write_bytes(content)
    for read in (lambda: reader.sample("5.1"), lambda: list(reader.read_samples(SampleQuery(first=2, last=2)))):
        with pytest.raises(ConfigError) as raised:
            read()
        assert path.name in raised.value.expected
    (run_dir / INDEX).unlink()
    assert reader.refresh() and reader.sample("7.1") is not None


def test_a_transaction_takes_few_sample_files(run_dir: Path) -> None:
    steps: list[int] = []
    index = Index(run_dir, run_dir / INDEX, bytes_at_once=1)
    assert index.update(RUN, steps.append)
    assert len(steps) == 5 and sum(steps) == (run_dir / "metrics.jsonl").stat().st_size  # four files and the alarm
    assert RunReader(run_dir).contents().samples == 13


def test_a_locked_index_is_no_damaged_one(run_dir: Path, reader: RunReader) -> None:
    write(run_dir, [{"kind": "alarm", "text": "later"}])
    with closing(sqlite3.connect(run_dir / INDEX, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError) as raised:
            Index(run_dir, run_dir / INDEX, busy_seconds=0.01).update(RUN)
    assert "elete" not in raised.value.do
    assert reader.refresh()


def test_a_reader_leaves_the_runs_files_alone(run_dir: Path) -> None:
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    reader = RunReader(run_dir)
    reader.refresh()
    reader.summary()
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and not path.name.startswith(INDEX)}
    assert after == before


def test_a_run_without_an_end_and_without_an_owner_is_interrupted(run_dir: Path, reader: RunReader) -> None:
    (run_dir / "summary.json").write_text(json.dumps({"run": RUN, "state": "running", "reason": ""}))
    assert reader.summary()["state"] == "interrupted"
    (run_dir / "summary.json").write_text(json.dumps({"run": RUN, "state": "done", "reason": ""}))
    assert reader.summary()["state"] == "done"


def test_token_texts_come_from_the_recorded_vocabulary(run_dir: Path, reader: RunReader) -> None:
    (run_dir / "vocabulary.json").write_text(json.dumps(["a", " b"]))
    assert reader.token_texts([1, 0, 7]) == [" b", "a", ""]


def test_a_directory_of_runs_lists_them(run_dir: Path, tmp_path: Path) -> None:
    assert run_directories(tmp_path) == [run_dir] == run_directories(run_dir)
    with pytest.raises(ConfigError):
        run_directories(run_dir / "samples")
    with pytest.raises(ConfigError):
        RunReader(tmp_path)


def test_means_of_an_episode_are_those_of_its_sampled_tokens() -> None:
    """The environment's tokens have numbers of 0, which mean nothing."""
    line = sample(1, 2, 0, advantage=[0.5, 0.0, 0.0, 1.0], logprobs=[-1.0, 0.0, 0.0, -2.0], tokens=2)
    row = sample_row({**line, "turns": [{"start": 0, "end": 1}, {"start": 3, "end": 4}]})
    assert (row.advantage, row.logprob) == (0.75, -1.5)
    assert (sample_row(line).advantage, sample_row(line).logprob) == (0.375, -0.75)


def test_a_text_is_found_as_it_is_at_any_length(run_dir: Path) -> None:
    long = "a% b_c\\d" + "x" * 60_000
    write_samples(run_dir, "iteration_0003.jsonl", [sample(3, 9, 0, prompt=long), sample(3, 9, 1, response="axb")])
    reader = RunReader(run_dir)
    reader.refresh()
    assert [reader.find_samples(SampleQuery(text=text))[0] for text in (long.upper(), "A%", "a_", "xb")] == [1, 1, 0, 1]


def test_an_older_copy_of_the_records_replaces_the_index(run_dir: Path, reader: RunReader) -> None:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:2]))
    assert reader.refresh() and reader.contents().iterations == 1
