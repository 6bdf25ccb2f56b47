"""The megatron policy and critic compared with transformers and plain torch, over families and layouts.

One start of the ranks runs every check of a layout, because starting costs more than checking.
"""

from pathlib import Path
from typing import Any

import pytest

from polyreme_trainer.megatron.huggingface.families import known_families
from support import family_checks
from support import model_checks as checks
from support.models import tiny_family_model, tiny_model
from support.ranks import run_ranks

pytestmark = pytest.mark.real


@pytest.mark.parametrize("tensor", [1, 2])
def test_every_family_equals_transformers(tensor: int, tmp_path: Path) -> None:
    """Every family is tested with tied and untied embeddings."""
    for model_type in known_families():
        for tied in (True, False):
            tiny_family_model(model_type, tmp_path / f"{model_type}-{'tied' if tied else 'untied'}", tie_word_embeddings=tied)
    run_ranks(family_checks.every_family, tensor, str(tmp_path), str(tensor), timeout=560)


def test_two_ranks_share_each_key_head_and_the_gradient_of_its_norm(tmp_path: Path) -> None:
    tiny_family_model("qwen3", tmp_path / "qwen3")
    run_ranks(family_checks.every_family, 4, str(tmp_path), "4", timeout=280)


def test_experts_on_two_data_ranks_equal_plain_torch(tmp_path: Path) -> None:
    """A rank's rows may send no token to an expert."""
    model = tiny_family_model("qwen2_moe", tmp_path / "model")
    run_ranks(checks.every_check, 2, str(model), "1", "2", str(tmp_path), timeout=280)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SEVERAL_KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": YARN},
    "mistral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
    "gemma3_text": {
        "attention_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


def test_variants_equal_transformers_over_their_whole_context(tmp_path: Path) -> None:
    """The variants are rotary embeddings, biases, and windows shorter than the context."""
    for model_type, fields in SEVERAL_KINDS.items():
        tiny_family_model(model_type, tmp_path / model_type, **fields)
    run_ranks(family_checks.positions_agree, 1, str(tmp_path), timeout=280)


@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_model_equals_transformers_and_plain_torch(kind: str, tensor: int, data: int, tmp_path: Path) -> None:
    model = tiny_model(kind, tmp_path / "model")
    run_ranks(checks.every_check, tensor * data, str(model), str(tensor), str(data), str(tmp_path))


@pytest.mark.parametrize(("tensor", "data"), [(4, 1), (2, 2)])
def test_more_ranks_than_key_value_heads_and_both_kinds_of_ranks_at_once(tensor: int, data: int, tmp_path: Path) -> None:
    model = tiny_model("tied", tmp_path / "model")
    run_ranks(checks.every_check, tensor * data, str(model), str(tensor), str(data), str(tmp_path))


def test_files_that_are_damaged_or_wrong_and_gradients_that_are_not_finite(tmp_path: Path) -> None:
    tied, untied = tiny_model("tied", tmp_path / "tied"), tiny_model("untied", tmp_path / "untied")
    run_ranks(checks.files_and_failures, 1, str(tied), str(untied), str(tmp_path))


@pytest.mark.parametrize("tensor", [1, 2])
def test_recomputed_activations_change_no_gradient(tensor: int, tmp_path: Path) -> None:
    run_ranks(checks.recomputed_gradients_are_the_same, tensor, str(tiny_model("tied", tmp_path / "model")), str(tensor))


@pytest.mark.parametrize("tensor", [1, 2])
def test_tokens_that_sequences_have_in_common_change_no_gradient(tensor: int, tmp_path: Path) -> None:
    run_ranks(checks.joined_beginnings_have_the_same_gradients, tensor, str(tiny_model("tied", tmp_path / "model")), str(tensor))
