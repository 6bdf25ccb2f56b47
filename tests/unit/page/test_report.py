"""The offline report: one file that loads nothing, with a selection of samples."""

import json
import re
from pathlib import Path

import pytest

from polyreme.errors import ConfigError
from polyreme.page.report import chosen_samples, embedded, page, report, spread
from polyreme.rundir.reader import RunReader
from support.seeded_run import record_run


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    folder = tmp_path_factory.mktemp("report") / "run"
    record_run(folder, iterations=12, seed=1)
    reader = RunReader(folder)
    reader.refresh()
    return reader


@pytest.mark.parametrize(("last", "count", "numbers"), [(0, 5, []), (1, 5, [1]), (3, 5, [1, 2, 3]), (100, 3, [1, 51, 100])])
def test_iterations_are_spread_with_both_ends(last: int, count: int, numbers: list[int]) -> None:
    assert spread(last, count) == numbers


@pytest.mark.parametrize("out", ["", "no/such/folder/report.html"])
def test_a_file_that_cannot_be_written_is_refused_before_the_runs_are_read(tmp_path: Path, out: str) -> None:
    with pytest.raises(ConfigError) as raised:
        report([tmp_path / "no run"], tmp_path / out, 10)
    assert "--out" in raised.value.expected and str(tmp_path / out) in raised.value.found


def test_samples_come_from_the_whole_run(reader: RunReader) -> None:
    chosen = chosen_samples(reader, 60)
    assert len(chosen) <= 60 and {1, 12} <= {each["step"] for each in chosen}
    ids = {each["id"] for each in chosen}
    assert all(peer["id"] in ids for each in chosen for peer in each["peers"]), "every link leads somewhere"


def test_the_file_has_no_reference_to_anything_outside(reader: RunReader) -> None:
    text = page(embedded({"<run>": reader}, 20))
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', text.partition('<script type="application/json"')[0])
    assert "static/" not in text.partition("<script")[0] and text.count("</script>") == 5


def test_a_sample_with_markup_does_not_end_the_data(reader: RunReader) -> None:
    text = page({"response": "<!--<script></script>", "loss": float("nan")})
    _, _, data = text.partition('id="embedded">')
    data, _, _ = data.partition("</script>")
    assert "<" not in data and json.loads(data) == {"response": "<!--<script></script>", "loss": None}
