"""What `polyreme convert` refuses: each error names what it found, and nothing is written."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polyreme.errors import ConfigError
from polyreme_trainer.convert.command import CheckpointFormat, Layers, convert
from polyreme_trainer.convert.layout import FILE
from support.models import tiny_family_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_family_model("qwen3", tmp_path_factory.mktemp("model"), tie_word_embeddings=False, num_hidden_layers=4)


@pytest.fixture
def megatron(model: Path, tmp_path: Path) -> Path:
    convert(model, tmp_path / "megatron", tensor=2, pipeline=2)
    return tmp_path / "megatron" / "iter_0000001"


@pytest.fixture
def virtual(model: Path, tmp_path: Path) -> Path:
    """Each file has two entries, and each of these one layer."""
    convert(model, tmp_path / "virtual", pipeline=2, virtual_pipeline=2)
    return tmp_path / "virtual" / "iter_0000001"


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
    assert "mp_rank_01_000" in refused(megatron, model, tmp_path).found


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


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda content: content.pop("model1"), "model0"),
        (lambda content: content.update(model=content["model0"]), "model, model0, model1"),
        (lambda content: content["model1"].clear(), "model0, model1"),
    ],
    ids=["the first only", "another entry", "an empty one"],
)
def test_virtual_stages_that_are_incomplete(virtual: Path, model: Path, tmp_path: Path, edit: Any, named: str) -> None:
    change(virtual / "mp_rank_00_001" / FILE, edit)
    error = refused(virtual, model, tmp_path)
    assert named in error.found and "mp_rank_00_001" in error.expected


def test_files_with_different_numbers_of_virtual_stages(virtual: Path, model: Path, tmp_path: Path) -> None:
    def join(content: Any) -> None:
        content["model"] = content.pop("model0") | content.pop("model1")

    change(virtual / "mp_rank_00_001" / FILE, join)
    assert "1 in mp_rank_00_001" in refused(virtual, model, tmp_path).found


def test_a_layer_in_another_virtual_stage(virtual: Path, model: Path, tmp_path: Path) -> None:
    """The report names the virtual stage."""

    def move(content: Any) -> None:
        name = "decoder.layers.0.mlp.linear_fc2.weight"
        content["model0"][name.replace(".0.", ".1.")] = content["model1"].pop(name)

    change(virtual / "mp_rank_00_000" / FILE, move)
    error = refused(virtual, model, tmp_path)
    assert error.found == "unexpected: decoder.layers.1.mlp.linear_fc2.weight" and "mp_rank_00_000, model0" in error.expected


SIZES = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_arguments_that_contradict_the_files(model: Path, megatron: Path, tmp_path: Path, name: str, size: int) -> None:
    change(megatron / "mp_rank_01_001" / FILE, lambda content: setattr(content["args"], name, size))
    error = refused(megatron, model, tmp_path)
    assert f"{name} {size}" in error.expected and "mp_rank_01_001" in error.expected
    assert "2 tensor and 2 pipeline ranks" in error.found


@pytest.mark.parametrize(("name", "size"), [("expert_model_parallel_size", 1), ("expert_tensor_parallel_size", 2)])
def test_arguments_that_contradict_the_experts_in_the_files(tmp_path: Path, name: str, size: int) -> None:
    model = tiny_family_model("qwen3_moe", tmp_path / "model", num_experts=4)
    convert(model, tmp_path / "megatron", tensor=2, expert=2, expert_tensor=1)
    folder = tmp_path / "megatron" / "iter_0000001"
    change(folder / "mp_rank_01_001" / FILE, lambda content: setattr(content["args"], name, size))
    error = refused(folder, model, tmp_path)
    assert f"{name} {size}" in error.expected and "2 expert ranks, each expert cut over 1" in error.found
    change(folder / "mp_rank_01_001" / FILE, lambda content: setattr(content["args"], "moe_tp_extend_ep", True))
    convert(folder, tmp_path / "back", config=model)  # MindSpeed's argument changes what the two count


def test_a_tensor_rank_of_which_no_file_is_left(model: Path, megatron: Path, tmp_path: Path) -> None:
    """The remaining files look like those of fewer tensor ranks."""
    for stage in (0, 1):
        shutil.rmtree(megatron / f"mp_rank_01_00{stage}")
    error = refused(megatron, model, tmp_path)
    assert "tensor_model_parallel_size 2" in error.expected and "1 tensor" in error.found


@pytest.mark.parametrize("option", ["tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor"])
def test_options_that_contradict_the_files(model: Path, megatron: Path, tmp_path: Path, option: str) -> None:
    error = refused(megatron, model, tmp_path, **{option: 3})
    assert " 3 in" in error.expected and "2 tensor and 2 pipeline ranks" in error.found


def test_options_that_nothing_uses(model: Path, megatron: Path, tmp_path: Path) -> None:
    assert refused(megatron, model, tmp_path, vocab_multiple=64).found == "--vocab-multiple 64"
    assert refused(model, model, tmp_path, virtual_pipeline=2).found == "--virtual-pipeline 2"
    with pytest.raises(ConfigError) as caught:
        convert(model, tmp_path / "other", iteration=3)
    assert caught.value.found == "--iteration 3"


def test_a_rank_that_cuts_experts_is_missing(tmp_path: Path) -> None:
    model = tiny_family_model("qwen3_moe", tmp_path / "model", num_experts=4)
    convert(model, tmp_path / "megatron", tensor=2, expert=4, expert_tensor=1)
    folder = tmp_path / "megatron" / "iter_0000001"
    (folder / "mp_rank_01_003").rename(folder / "mp_rank_00_003")
    error = refused(folder, model, tmp_path)
    assert error.found == "no mp_rank_01_003; also mp_rank_00_003"


def test_parts_of_different_dtypes(model: Path, megatron: Path, tmp_path: Path) -> None:
    """No number changes, so nothing is rounded."""
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    change(megatron / "mp_rank_01_001" / FILE, lambda content: content["model"].update({name: content["model"][name].half()}))
    error = refused(megatron, model, tmp_path)
    assert "torch.float32" in error.expected and "torch.float16 in mp_rank_01_001" in error.found


@pytest.mark.parametrize("options", [{}, {"file_format": CheckpointFormat.torch_dist}], ids=["torch", "torch_dist"])
def test_tensors_of_one_parameter_with_different_dtypes(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    shutil.copytree(model, tmp_path / "mixed")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file(tensors | {name: tensors[name].half()}, tmp_path / "mixed" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "mixed", tmp_path / "megatron", **options)
    assert name in caught.value.found and "linear_qkv" in caught.value.expected


def test_a_tensor_of_a_directory_that_would_be_lost(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "more")
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"score.weight": torch.ones(1, 32)}, tmp_path / "more" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        convert(tmp_path / "more", tmp_path / "megatron")
    assert caught.value.found == "unexpected: score.weight"
    convert(tmp_path / "more", tmp_path / "critic", orm=True)  # a critic may keep the language model's head


def test_what_is_no_checkpoint(model: Path, megatron: Path, tmp_path: Path) -> None:
    assert "none of them" in refused(tmp_path, model, tmp_path).found
    assert "nowhere" in refused(tmp_path / "nowhere", model, tmp_path).found
    assert "iter_0000007" in refused(megatron.parent, model, tmp_path, iteration=7).expected
    (megatron.parent / "latest_checkpointed_iteration.txt").write_text("../etc")
    assert "../etc" in refused(megatron.parent, model, tmp_path).found


def test_a_checkpoint_without_a_description_of_its_model(megatron: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(megatron.parent, tmp_path / "back")
    assert "--config" in caught.value.do


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", {"tensor": 3}),
        ("qwen3", {"pipeline": 3}),
        ("qwen3", {"expert": 2}),
        ("qwen3_moe", {"expert": 3}),
        ("qwen3_moe", {"layers": Layers.transformer_engine}),
        ("qwen3", {"virtual_pipeline": 2}),
        ("qwen3", {"pipeline": 2, "virtual_pipeline": 2}),
        ("qwen3", {"tensor": 2, "expert_tensor": 1}),
        ("qwen3_moe", {"expert_tensor": 2}),
        ("qwen3_moe", {"tensor": 2, "expert": 5, "expert_tensor": 1}),
    ],
)
def test_a_layout_over_which_the_model_does_not_divide(family: str, layout: dict[str, Any], tmp_path: Path) -> None:
    source = tiny_family_model(family, tmp_path / "model")
    with pytest.raises(ConfigError):
        convert(source, tmp_path / "megatron", **layout)
    assert not (tmp_path / "megatron").exists()


@pytest.fixture
def matrices(tmp_path: Path) -> tuple[Path, Path]:
    """A model with experts, and its files of two tensor and two expert ranks with a rank's experts in two matrices."""
    model = tiny_family_model("qwen3_moe", tmp_path / "experts", num_experts=4, tie_word_embeddings=False)
    convert(model, tmp_path / "matrices", tensor=2, expert=2, layers=Layers.grouped)
    return model, tmp_path / "matrices" / "iter_0000001"


def test_matrices_of_experts_whose_number_of_ranks_is_unknown(matrices: tuple[Path, Path], tmp_path: Path) -> None:
    """Two expert ranks with whole experts have matrices of the same shape as one with halves of twice as many."""
    model, folder = matrices
    for file in folder.glob("mp_rank_*"):
        change(file / FILE, lambda content: content.pop("args"))
    assert "--expert" in refused(folder, model, tmp_path).do
    assert "missing" not in refused(folder, model, tmp_path, expert=1).found, "one expert rank would be a pipeline rank"
    convert(folder, tmp_path / "known", config=model, expert=2)
    back, hf = (load_file(path / "model.safetensors") for path in (tmp_path / "known", model))
    assert back.keys() == hf.keys() and all(torch.equal(back[name], hf[name]) for name in hf)


def test_matrices_of_experts_of_another_model(matrices: tuple[Path, Path], tmp_path: Path) -> None:
    _, folder = matrices
    for fields in ({"num_experts": 5}, {"num_experts": 4, "hidden_size": 64}, {"num_experts": 4, "moe_intermediate_size": 48}):
        other = tiny_family_model("qwen3_moe", tmp_path / f"other-{fields}", tie_word_embeddings=False, **fields)
        assert "config.json" in refused(folder, other, tmp_path).do


@pytest.mark.parametrize(
    ("family", "file_format"), [("qwen3", CheckpointFormat.torch), ("qwen3_moe", CheckpointFormat.torch_dist)]
)
def test_matrices_of_experts_that_the_files_cannot_have(family: str, file_format: CheckpointFormat, tmp_path: Path) -> None:
    source = tiny_family_model(family, tmp_path / "model")
    with pytest.raises(ConfigError):
        convert(source, tmp_path / "megatron", file_format=file_format, layers=Layers.grouped)
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
