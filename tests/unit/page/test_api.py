"""The page's HTTP interface on a run directory, without a socket."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from polyreme.page import answers
from polyreme.page.api import application, is_open
from polyreme.page.runs import Runs
from polyreme.rundir.reader import RunReader
from polyreme.rundir.run_directory import owned
from support.seeded_run import record_run


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    folder = tmp_path_factory.mktemp("runs")
    record_run(folder / "first", iterations=4, seed=1)
    record_run(folder / "second", iterations=2, seed=2)
    runs = Runs([folder])
    runs.refresh()
    return TestClient(application(runs))


def get(client: TestClient, path: str) -> Any:
    answer = client.get(f"/ui/api/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def curves(client: TestClient, wanted: Any) -> Any:
    answer = client.post("/ui/api/curves", json=wanted)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_runs_are_listed(client: TestClient) -> None:
    runs = {run["name"]: run for run in get(client, "runs")}
    assert runs.keys() == {"first", "second"}
    assert runs["first"]["iteration"] == 4 and runs["first"]["indexed"] and runs["first"]["samples"] > 0
    assert "reward/mean" in runs["first"]["metrics"]


def test_curves_of_several_runs_and_metrics(client: TestClient) -> None:
    found = curves(
        client, {"first": {"reward/mean": -1, "none": -1}, "second": {"reward/mean": -1}, "third": {"reward/mean": -1}}
    )
    assert {name: each["reward/mean"]["steps"] for name, each in found.items()} == {"first": [1, 2, 3, 4], "second": [1, 2]}
    assert found["first"].keys() == {"reward/mean"}


def test_a_page_gets_only_the_points_that_it_lacks(client: TestClient) -> None:
    found = curves(client, {"first": {"reward/mean": 2, "entropy": 4}})
    assert found["first"]["reward/mean"]["steps"] == [3, 4] and "entropy" not in found["first"]


@pytest.mark.parametrize("body", ["", "[1]", '{"first": []}', '{"first": {"entropy": "last"}}'])
def test_a_question_for_curves_that_is_none_is_refused(client: TestClient, body: str) -> None:
    assert client.post("/ui/api/curves", content=body).status_code == 400


def test_samples_by_filter_and_by_id(client: TestClient) -> None:
    page = get(client, "runs/first/samples?first=2&last=2&kind=train&limit=3&order=-score")
    assert len(page["samples"]) == 3 < page["total"] and {each["step"] for each in page["samples"]} == {2}
    assert page["samples"] == sorted(page["samples"], key=lambda each: -each["score"])
    life = get(client, f"runs/first/samples/{page['samples'][0]['id']}")
    assert life["response"] and life["trained_at"] and life["spans"] and life["peers_total"] >= 1
    assert client.get("/ui/api/runs/first/samples/99999.0").status_code == 404


@pytest.mark.parametrize("query", ["first=x", "unknown=1", "score_min=high"])
def test_a_filter_that_is_none_is_refused(client: TestClient, query: str) -> None:
    assert client.get(f"/ui/api/runs/first/samples?{query}").status_code == 400


def test_the_timeline_has_the_learner_the_groups_and_the_swaps(client: TestClient) -> None:
    found = get(client, "runs/first/timeline?first=2&last=3")
    assert [each["iteration"] for each in found["iterations"]] == [2, 3]
    assert all(each["seconds"] >= each["learner_wait"] + each["train"] for each in found["iterations"])
    assert found["groups"] and {event["kind"] for event in found["events"]} >= {"commit"}


def test_a_list_of_samples_cuts_texts_unless_they_are_wanted_whole(tmp_path: Path) -> None:
    record_run(tmp_path / "long", iterations=1, seed=1)
    [path] = (tmp_path / "long" / "samples").glob("iteration_*.jsonl")
    lines = [{**json.loads(line), "response": "x" * 500} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = Runs([tmp_path])
    runs.refresh()
    page = TestClient(application(runs))
    lengths = [
        {len(each["response"]) for each in get(page, f"runs/long/samples?kind=train{more}")["samples"]}
        for more in ("", "&whole=1")
    ]
    assert lengths == [{400}, {500}]


def test_the_table_of_runs_has_newest_metrics_and_own_settings(client: TestClient) -> None:
    found = get(client, "finals")
    assert found.keys() == {"first", "second"}
    last = curves(client, {"first": {"entropy": 3}})["first"]["entropy"]["mean"][-1]
    assert found["first"]["metrics"]["entropy"] == pytest.approx(last, rel=1e-5)
    assert found["first"]["seconds"] == pytest.approx(32.0) and found["first"]["ended"] > 1e9
    assert found["first"]["settings"]["trainer.optimizer.lr"] == 0.001 and "seed" not in found["first"]["settings"]


def test_a_fork_names_its_parent(tmp_path: Path) -> None:
    record_run(tmp_path / "fork", iterations=1, seed=1)
    origin = {"run_id": "parent-1", "run_dir": "/gone", "iteration": 7, "group": 28}
    (tmp_path / "fork" / "run.json").write_text(json.dumps({"run_id": "fork-1", "redis": "embedded", "forked_from": origin}))
    assert answers.overview("fork", RunReader(tmp_path / "fork"), True)["origin"] == {"run": "parent-1", "iteration": 7}


def test_an_evaluation_that_ends_after_its_iterations_is_in_the_timeline(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "letters-1", "redis": "embedded"}))
    iterations = ({"kind": "iteration", "iteration": each, "time": 10.0 * each, "time/iteration": 10.0} for each in (1, 2, 3))
    evaluations = ({"kind": "eval", "version": each, "score": 1.0, "seconds": 6.0, "time": 10.0 * each + 6.5} for each in (1, 2))
    add_records(tmp_path, *iterations, *evaluations)
    reader = RunReader(tmp_path)
    reader.refresh()
    events = answers.timeline(reader, 1, 1)["events"]
    assert [event["version"] for event in events if event["kind"] == "eval"] == [1]


def test_details_have_servers_events_and_configuration(client: TestClient) -> None:
    found = get(client, "runs/first")
    assert found["summary"]["state"] == "done" and found["config"]["name"]
    assert [server["version"] for server in found["servers"]] == [4, 4]
    assert {"alarm", "eval", "saved"} <= {event["kind"] for event in found["events"]}
    assert client.get("/ui/api/runs/third").status_code == 404


def test_details_name_the_settings_that_are_not_defaults(client: TestClient, tmp_path: Path) -> None:
    found = get(client, "runs/first")
    assert {"name", "group_size", "trainer.optimizer.lr", "reward.rewards.0.name"} <= set(found["changed"])
    assert not {"seed", "reward.rewards.0.weight", "trainer.optimizer"} & set(found["changed"])
    record_run(tmp_path / "later", iterations=1, seed=1)
    (tmp_path / "later" / "config.yaml").write_text("name: later\nof_a_later_release: 1\n")
    details = answers.details(RunReader(tmp_path / "later"))
    assert details["changed"] is None and details["config"]["of_a_later_release"] == 1


def test_replicas_of_an_ended_run_are_not_registered(client: TestClient, tmp_path: Path) -> None:
    assert {server["state"] for server in get(client, "runs/first")["servers"]} == {"ended"}
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "letters-1", "redis": "embedded"}))
    (tmp_path / "summary.json").write_text(json.dumps({"run": "letters-1", "state": "running"}))
    for names in (["a", "b"], ["b"]):
        add_records(tmp_path, {"kind": "replicas", "replicas": dict.fromkeys(names, "http://127.0.0.1:1/v1"), "time": 1.0})
    reader = RunReader(tmp_path)
    reader.refresh()
    with owned(tmp_path):
        assert {server["name"]: server["state"] for server in answers.servers(reader)} == {"b": "registered", "a": "gone"}


def test_a_live_run_says_what_it_loads(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "letters-1", "redis": "embedded"}))
    load = {"kind": "loading", "role": "reward model quality", "fraction": 0.25, "seconds_left": 75.0, "time": 100.0}
    engine = {"kind": "engine_start", "host": "a", "pid": 7, "engine": "vllm", "time": 100.0}
    add_records(tmp_path, load, {**load, "role": "actor"}, engine, {**load, "role": "actor", "fraction": 1.0})
    reader = RunReader(tmp_path)
    reader.refresh()
    assert answers.activities(reader, 112.0) == [
        "loading the reward model quality: 25%, remaining about 1:15",
        "replica: vllm starts on a, for 0:12",
    ]
    add_records(tmp_path, {"kind": "start", "start": 2, "forked_from": None, "time": 200.0})
    reader.refresh()
    assert answers.activities(reader, 212.0) == []
    assert answers.overview("letters", reader, True)["activities"] == []  # no process owns the directory


def add_records(run_dir: Path, *records: dict[str, Any]) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps({"run": "letters-1", "id": "1-0", **record}) + "\n" for record in records)


def test_the_page_loads_nothing_from_another_host(client: TestClient) -> None:
    page = client.get("/ui/")
    assert page.status_code == 200 and "default-src 'self'" in page.headers["content-security-policy"]
    assert "http:" not in page.text.replace("http://www.w3.org/2000/svg", "") and "https:" not in page.text
    names = re.findall(r'(?:src|href)="(static/[^"]+)"', page.text)
    loaded = {name.rpartition("/")[2] for name in names}
    assert {"app.js", "style.css", "uplot.js", "preact.js", "curve_store.js"} <= loaded
    assert not loaded & {"samples.js", "tokens.js", "timeline.js"}, "the modules of other views are loaded when they are shown"
    for name in names:
        asset = client.get(f"/ui/{name}")
        assert (
            asset.status_code == 200
            and asset.headers["content-encoding"] == "gzip"
            and "immutable" in asset.headers["cache-control"]
        )
    assert client.get("/ui/static/0123456789abcdef/app.js").status_code == 404  # of another release
    lazy = names[0].split("/")[1]
    assert client.get(f"/ui/static/{lazy}/vendor/diff.js", headers={"accept-encoding": "identity"}).text.startswith("((global")
    assert client.get(f"/ui/static/{lazy}/../api.py").status_code == 404 == client.get(f"/ui/static/{lazy}/none.js").status_code


def test_only_the_page_itself_is_open_without_the_token() -> None:
    assert all(map(is_open, ("/", "/ui", "/ui/", "/ui/static/app.js")))
    assert not any(map(is_open, ("/ui/api/runs", "/metrics", "/v1/chat", "/ui/api/", "/uix")))


def test_runs_of_the_same_name_stay_apart(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        record_run(tmp_path / parent / "same", iterations=1, seed=3)
    assert Runs([tmp_path / "a", tmp_path / "b"]).readers.keys() == {"same", "same-2"}


BIG = 10**30


@pytest.mark.parametrize(
    "path", [f"samples?offset={BIG}", f"samples?first={BIG}", f"samples?prompt={BIG}", f"timeline?first={-BIG}&last={BIG}"]
)
def test_numbers_beyond_the_database_are_bad_requests(client: TestClient, path: str) -> None:
    assert client.get(f"/ui/api/runs/first/{path}").status_code == 400


@pytest.mark.parametrize(
    "body",
    ["[" * 100_000, f'{{"first": {{"reward/mean": {BIG}}}}}', '{"first": {"reward/mean": 1e400}}'],
    ids=["deep", "big", "inf"],
)
def test_curves_of_no_step_are_bad_requests(client: TestClient, body: str) -> None:
    assert client.post("/ui/api/curves", content=body).status_code == 400


def test_a_negative_limit_is_no_sample(client: TestClient) -> None:
    assert get(client, "runs/first/samples?limit=-1")["samples"] == []


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        record_run(tmp_path / name, iterations=1, seed=1)
    runs = Runs([tmp_path, tmp_path / "first"])
    runs.refresh()
    page = TestClient(application(runs))
    (tmp_path / "first" / "config.yaml").write_text("name: [")
    shutil.rmtree(tmp_path / "third")
    found = {run["name"]: run for run in get(page, "runs")}
    assert {name: run["state"] for name, run in found.items()} == {"first": "unreadable", "second": "done", "third": "unreadable"}
    assert "config.yaml" in found["first"]["reason"] and "second" in get(page, "finals")
    runs.refresh()
    assert [run["name"] for run in get(page, "runs")] == ["second", "first"]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    record_run(tmp_path / "first", iterations=1, seed=1)
    summary = tmp_path / "first" / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "loss": float("nan")}))
    assert get(TestClient(application(Runs([tmp_path]))), "runs/first")["summary"]["loss"] is None
