"""Tags and notes of runs, which only a page on the server's own machine may change."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from polyreme.page.api import application
from polyreme.page.notes import NOTES, read_notes
from polyreme.page.runs import Runs
from support.seeded_run import record_run

JSON = {"content-type": "application/json"}
NOTE = {"tags": ["baseline", "paper"], "note": "the best so far"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    record_run(folder / "first", iterations=1, seed=1)
    return folder


def page(folder: Path, client: str = "127.0.0.1", base_url: str = "http://127.0.0.1:8430") -> TestClient:
    return TestClient(application(Runs([folder])), base_url=base_url, client=(client, 50000))


def post(folder: Path, body: Any, headers: dict[str, str] | None = None, **where: str) -> int:
    sent = page(folder, **where).post("/ui/api/runs/first/notes", content=json.dumps(body), headers=JSON | (headers or {}))
    return sent.status_code


def test_notes_are_stored_beside_the_run(folder: Path) -> None:
    assert post(folder, {**NOTE, "tags": [" baseline", "paper", "baseline", ""]}) == 200
    assert json.loads((folder / "first" / NOTES).read_text()) == NOTE
    row = page(folder).get("/ui/api/finals").json()["first"]
    assert {key: row[key] for key in NOTE} == NOTE and row["writable"]
    assert post(folder, {"note": "second thoughts"}) == 200 and post(folder, {"tags": []}) == 200
    assert read_notes(folder / "first") == {"tags": [], "note": "second thoughts"}
    assert page(folder).post("/ui/api/runs/none/notes", json=NOTE).status_code == 404


@pytest.mark.parametrize(
    ("headers", "where"),
    [
        ({}, {"client": "10.0.0.7"}),
        ({}, {"base_url": "http://rebound.example:8430"}),
        ({"origin": "http://elsewhere.example"}, {}),
        ({"origin": "http://127.0.0.1:9000"}, {}),
        ({"sec-fetch-site": "cross-site"}, {}),
        ({"content-type": "text/plain"}, {}),
    ],
)
def test_only_a_page_of_this_server_on_this_machine_changes_them(
    folder: Path, headers: dict[str, str], where: dict[str, str]
) -> None:
    before = read_notes(folder / "first")
    assert post(folder, {"tags": ["stolen"], "note": ""}, headers, **where) == 403
    assert read_notes(folder / "first") == before
    if where:
        assert not page(folder, **where).get("/ui/api/finals").json()["first"]["writable"]


@pytest.mark.parametrize(
    "body", [[], "note", {"tags": "a", "note": ""}, {"tags": [1], "note": ""}, {"tags": ["a" * 41], "note": ""},
             {"tags": [str(each) for each in range(21)], "note": ""}, {"tags": [], "note": "x" * 4001}, {**NOTE, "more": 1}]
)  # fmt: skip
def test_notes_beyond_the_limits_are_refused(folder: Path, body: Any) -> None:
    before = read_notes(folder / "first")
    assert post(folder, body) == 400
    assert read_notes(folder / "first") == before


def test_a_damaged_file_is_no_note_and_is_not_replaced(tmp_path: Path) -> None:
    record_run(tmp_path / "first", iterations=1, seed=1)
    (tmp_path / "first" / NOTES).write_text('{"tags": "x')
    assert read_notes(tmp_path / "first") == {"tags": [], "note": ""}
    assert post(tmp_path, NOTE) == 400
    assert (tmp_path / "first" / NOTES).read_text() == '{"tags": "x'


def test_half_a_character_in_a_note_breaks_no_page(tmp_path: Path) -> None:
    record_run(tmp_path / "first", iterations=1, seed=1)
    assert post(tmp_path, {"note": "cut \ud83d"}) == 200
    assert page(tmp_path).get("/ui/api/finals").json()["first"]["note"] == "cut \ud83d"
