"""Files for trying rewards out are read as a run reads its data."""

import json
from pathlib import Path

import pytest

from polyreme.errors import DataError
from polyreme_reward.scorer import Part
from polyreme_reward.trial import read_items, shown_part


def test_rows_mean_what_they_mean_in_a_run(tmp_path: Path) -> None:
    rows = [{"response": "a\u2028b", "label": 42}, {"response": "", "label": ["x"]}, {"response": "r", "label": None}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert [(item.response, item.label) for item in read_items(path)] == [("a\u2028b", "42"), ("", "x"), ("r", "")]


def test_a_label_that_is_none_is_told_with_its_line(tmp_path: Path) -> None:
    (path := tmp_path / "rows.jsonl").write_text('{"response": "r"}\n{"response": "r", "label": {"a": 1}}')
    with pytest.raises(DataError, match=r"text under label in .*rows.jsonl, line 2"):
        list(read_items(path))


def test_a_part_shows_what_its_weight_makes_of_it() -> None:
    assert shown_part(Part("exact", 0.5, 0.5, "v")) == "0.5"
    assert shown_part(Part("shape", 0.5, 0.1, "v")) == "0.5 (0.1)"
