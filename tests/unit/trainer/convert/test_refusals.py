"""What `polyreme convert` refuses: each error names what it found, and nothing is written."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polyreme.errors import ConfigError
from polyreme_trainer.convert.command import Layers, convert
from polyreme_trainer.convert.rank_files import FILE
from support.models import tiny_family_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_family_model("qwen3", tmp_path_factory.mktemp("model"), tie_word_embeddings=False)


@pytest.fixture
def megatron(model: Path, tmp_path: Path) -> Path:
    convert(model, tmp_path / "megatron", tensor=2, pipeline=2)
    return tmp_path / "megatron" / "iter_0000001"


def refused(source: Path, model: Path, tmp_path: Path, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        convert(source, tmp_path / "back", config=model, **options)
    assert not (tmp_path / "back").exists()
    return caught.value


def change(file: Path, edit: Any) -> None:
    content = torch.load(file, weights_only=False)
    edit(content)
    torch.save(content, file)


def test_a_target_that_is_there(model: Path, megatron: Path, tmp_path: Path) -> None:
    """Two conversions to one path, such as actor and critic, must not mix."""
    with pytest.raises(ConfigError) as caught:
        convert(model, tmp_path / "megatron", orm=True)
    assert "critic" in str(caught.value)
    assert (megatron / "mp_rank_00_000" / FILE).is_file()


def test_the_files_of_an_actor_and_a_critic_in_one_directory(model: Path, megatron: Path, tmp_path: Path) -> None:
    def to_critic(content: Any) -> None:
        del content["model"]["output_layer.weight"]
        content["model"]["rm_head.weight"] = torch.ones(1, 16)

    change(megatron / "mp_rank_01_001" / FILE, to_critic)
    for orm in (False, True):
        error = refused(megatron, model, tmp_path, orm=orm)
        assert "actor" in error.found and "critic" in error.found


def test_a_critic_without_orm_and_an_actor_with_it(model: Path, megatron: Path, tmp_path: Path) -> None:
    error = refused(megatron, model, tmp_path, orm=True)
    assert "missing: rm_head.weight" in error.found and "--orm" in str(error)


def test_a_head_with_a_bias(model: Path, megatron: Path, tmp_path: Path) -> None:
    def to_critic(content: Any) -> None:
        content["model"] |= {"rm_head.weight": torch.ones(1, 16), "rm_head.bias": torch.ones(1)}

    for tensor in range(2):
        change(megatron / f"mp_rank_{tensor:02d}_001" / FILE, to_critic)
    assert "rm_head.bias" in refused(megatron, model, tmp_path, orm=True).expected


def test_a_rank_that_is_missing(model: Path, megatron: Path, tmp_path: Path) -> None:
    shutil.rmtree(megatron / "mp_rank_01_000")
    assert "mp_rank_1_0" in refused(megatron, model, tmp_path).found


def test_parameters_that_are_missing_unexpected_or_of_another_shape(model: Path, megatron: Path, tmp_path: Path) -> None:
    def damage(content: Any) -> None:
        del content["model"]["decoder.layers.0.mlp.linear_fc2.weight"]
        content["model"] |= {"other.weight": torch.ones(2), "decoder.layers.0.input_layernorm.weight": torch.ones(5)}

    change(megatron / "mp_rank_00_001" / FILE, damage)
    error = refused(megatron, model, tmp_path)
    assert "missing: decoder.layers.0.mlp.linear_fc2.weight" in error.found
    assert "unexpected: other.weight" in error.found
    assert "decoder.layers.0.input_layernorm.weight (5,) instead of (32,)" in error.found
    assert "mp_rank_00_001" in error.expected


def test_copies_that_differ(model: Path, megatron: Path, tmp_path: Path) -> None:
    change(megatron / "mp_rank_01_001" / FILE, lambda content: content["model"]["decoder.final_layernorm.weight"].add_(1))
    error = refused(megatron, model, tmp_path)
    assert "model.norm.weight" in error.expected and "mp_rank_01_001" in error.found


def test_virtual_stages(model: Path, megatron: Path, tmp_path: Path) -> None:
    change(megatron / "mp_rank_00_000" / FILE, lambda content: content.update(model0=content.pop("model")))
    assert "virtual" in refused(megatron, model, tmp_path).found


def test_what_is_no_checkpoint(model: Path, megatron: Path, tmp_path: Path) -> None:
    assert "none of them" in refused(tmp_path, model, tmp_path).found
    assert "nowhere" in refused(tmp_path / "nowhere", model, tmp_path).found
    assert "iter_0000007" in refused(megatron.parent, model, tmp_path, iteration=7).expected
    (megatron.parent / "latest_checkpointed_iteration.txt").write_text("../etc")
    assert "../etc" in refused(megatron.parent, model, tmp_path).found


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", {"tensor": 3}),
        ("qwen3", {"pipeline": 3}),
        ("qwen3", {"expert": 2}),
        ("qwen3_moe", {"expert": 3}),
        ("qwen3_moe", {"layers": Layers.transformer_engine}),
    ],
)
def test_a_layout_over_which_the_model_does_not_divide(family: str, layout: dict[str, Any], tmp_path: Path) -> None:
    source = tiny_family_model(family, tmp_path / "model")
    with pytest.raises(ConfigError):
        convert(source, tmp_path / "megatron", **layout)
    assert not (tmp_path / "megatron").exists()


def test_another_iteration_and_its_directory(model: Path, megatron: Path, tmp_path: Path) -> None:
    megatron.rename(megatron.with_name("iter_0000030"))
    (megatron.parent / "latest_checkpointed_iteration.txt").write_text("30")
    for number, (source, iteration) in enumerate(
        ((megatron.parent, None), (megatron.parent, 30), (megatron.parent / "iter_0000030", None))
    ):
        convert(source, tmp_path / f"back-{number}", config=model, iteration=iteration)
        assert (
            load_file(tmp_path / f"back-{number}" / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()
        )
