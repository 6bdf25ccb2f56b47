"""docs/models.md names the existing families, and docs/reference/models.md the rotary embeddings."""

import re
from pathlib import Path

import pytest

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families import known_families
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.huggingface.families.rope import read_rope

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = "\n".join((DOCS / name).read_text() for name in ("models.md", "reference/models.md"))


def names(heading: str) -> list[str]:
    """The first column of the table under a heading."""
    table = PAGES.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)[1:]


def test_the_table_names_every_family() -> None:
    assert sorted(names("Families")) == list(known_families())


@pytest.mark.parametrize("kind", names("Rotary embeddings"))
def test_each_rotary_embedding_of_the_table_is_read(kind: str) -> None:
    fields = {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert read_rope(HfConfig({"rope_parameters": fields}), 128).kind == ("default" if kind == "dynamic" else kind)


def test_another_rotary_embedding_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        read_rope(HfConfig({"rope_parameters": {"rope_type": "longrope"}}), 128)
    assert set(names("Rotary embeddings")) <= set(re.findall(r"\w+", refused.value.expected))
