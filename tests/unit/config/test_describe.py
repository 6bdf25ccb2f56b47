"""The text of the schema."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.config.describe import annotated_yaml, reference
from polyreme.config.load import parse_config
from polyreme.config.run import RunConfig
from polyreme.config.section import known_keys
from support.configs import run_config

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "configuration.md"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data": {"train": "/a b/ü.jsonl", "max_prompt_tokens": 8, "system": 'two\nlines: "#"', "label_key": "true"}},
        {
            "reward": {
                "rewards": [
                    {"name": "exact", "options": {"after": "#", "deep": {"a": [1, None]}}},
                    {"url": ["https://a/", "https://b/"], "protocol": "native", "security": {"token_env": "T"}},
                ]
            }
        },
        {"security": {"token_env": "TOKEN"}},
        {"trainer": {"optimizer": {"lr": 1e-8}, "sft": [{"data": "/x", "steps": 1, "batch_size": 1, "lr": 1e-3}] * 2}},
    ],
)
def test_a_shown_configuration_reads_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = parse_config(yaml.safe_load(run_config(tmp_path).to_yaml()) | changes, "the test")
    assert parse_config(yaml.safe_load(annotated_yaml(config)), "the text") == config


def test_a_shown_configuration_has_every_description_and_default(tmp_path: Path) -> None:
    text = annotated_yaml(run_config(tmp_path))
    lines = text.splitlines()
    place = lines.index("  max_num_seqs: 256")
    assert lines[place - 1].endswith("(integer ≥ 1; default 256)")
    assert all(len(line) <= 120 for line in lines if line.lstrip().startswith("#"))
    for field in RunConfig.model_fields.values():
        assert (field.description or "").split(" ")[0] in text


def test_the_reference_is_current() -> None:
    assert REFERENCE.read_text() == reference(), "run `polyreme config reference > docs/reference/configuration.md`"


def test_the_reference_has_every_key() -> None:
    text = reference()
    for key in known_keys(RunConfig):
        assert f"| `{key.rpartition('.')[2]}`" in text


def test_what_a_preset_gives_is_not_called_required() -> None:
    runs = reference().partition("## Stages")[0]
    rows = [line for line in runs.splitlines() if line.startswith(("| `advantage` |", "| `loss` |", "| `minibatches` |"))]
    assert [row.split(" | ")[2] for row in rows] == ["by preset", "by preset", "1"]
