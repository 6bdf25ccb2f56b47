"""An adapter merged by `polyreme convert`. tests/integration/test_lora.py compares with PEFT's own merge."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyreme.config.trainer import LoraConfig
from polyreme.errors import ConfigError
from polyreme_trainer.convert.command import Layers, convert
from polyreme_trainer.megatron.huggingface.peft_files import CONFIG, TENSORS, PeftAdapter, read_adapter
from support.models import tiny_family_model

Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_family_model("qwen3", tmp_path_factory.mktemp("model"))


def written(folder: Path, tensors: dict[str, Tensor] | None = None, **fields: Any) -> Path:
    """An adapter of q_proj, with `fields` of its configuration replaced."""
    random = torch.Generator().manual_seed(0)
    pair = {
        f"{Q_PROJ}.lora_A.weight": torch.randn(4, 32, generator=random),
        f"{Q_PROJ}.lora_B.weight": torch.randn(48, 4, generator=random),
    }
    folder.mkdir()
    PeftAdapter(pair | (tensors or {}), LoraConfig(rank=4, alpha=6), "base").write(folder)
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))
    return folder


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("rslora", "scale"), [(False, 1.5), (True, 3.0)])
def test_the_adapted_weight_changes_and_no_other(model: Path, tmp_path: Path, rslora: bool, scale: float) -> None:
    adapter = written(tmp_path / "adapter", use_rslora=rslora)
    convert(model, tmp_path / "merged", adapter=adapter)
    before, after, pair = weights(model), weights(tmp_path / "merged"), load_file(adapter / TENSORS)
    a, b = (pair[f"base_model.model.{Q_PROJ}.lora_{which}.weight"] for which in "AB")
    expected = before[f"{Q_PROJ}.weight"] + scale * b @ a
    torch.testing.assert_close(after.pop(f"{Q_PROJ}.weight"), expected, rtol=0, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    assert len(after) == len(before) - 1


def test_a_weight_keeps_its_dtype(model: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_bytes((model / "config.json").read_bytes())
    before = {name: tensor.bfloat16() for name, tensor in weights(model).items()}
    save_file(before, half / "model.safetensors", metadata={"format": "pt"})
    adapter = written(tmp_path / "adapter")
    convert(half, tmp_path / "merged", adapter=adapter)
    pair = load_file(adapter / TENSORS)
    a, b = (pair[f"base_model.model.{Q_PROJ}.lora_{which}.weight"] for which in "AB")
    exact = before[f"{Q_PROJ}.weight"].double() + 1.5 * b.double() @ a.double()
    found = weights(tmp_path / "merged")[f"{Q_PROJ}.weight"]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)  # half a unit of the last digit


@pytest.mark.parametrize(
    "fields",
    [
        {"peft_type": "LOHA"},
        {"use_dora": True},
        {"bias": "all"},
        {"rank_pattern": {"q_proj": 8}},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["score"]},
        {"alora_invocation_tokens": [5, 6]},
        {"arrow_config": {"top_k": 2}},
        {"kasa_config": {}},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"monteclora_config": {"samples": 2}},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"use_bdlora": {"nblocks": 2}},
        {"use_qalora": True},
        *({"init_lora_weights": kind} for kind in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga")),
    ],
    ids=lambda fields: " ".join(f"{name} {value}" for name, value in fields.items()),
)
def test_more_than_plain_lora_is_refused_by_name(model: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        convert(model, tmp_path / "merged", adapter=written(tmp_path / "adapter", **fields))
    assert next(iter(fields)) in error.value.expected
    assert error.value.found == repr(next(iter(fields.values())))
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("initial", [True, False, "gaussian", "eva", "orthogonal"])
def test_an_initial_state_beside_unchanged_weights_is_plain_lora(tmp_path: Path, initial: bool | str) -> None:
    assert read_adapter(written(tmp_path / "adapter", init_lora_weights=initial)).scale == 1.5


@pytest.mark.parametrize(
    "tensors",
    [
        {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 32)},
        {
            "model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 32),
            "model.layers.9.mlp.up_proj.lora_B.weight": torch.zeros(56, 4),
        },
        {f"{Q_PROJ}.lora_B.weight": torch.zeros(47, 4)},
        {f"{Q_PROJ}.lora_magnitude_vector": torch.zeros(48)},
    ],
    ids=["A alone", "no such layer", "another shape", "another kind"],
)
def test_a_tensor_that_changes_no_weight_is_refused(model: Path, tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ConfigError) as error:
        convert(model, tmp_path / "merged", adapter=written(tmp_path / "adapter", tensors))
    assert any(name.removesuffix(".weight").rsplit(".", 1)[0] in error.value.found for name in tensors)
    assert not (tmp_path / "merged").exists()


def test_a_missing_or_damaged_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        convert(model, tmp_path / "merged", adapter=tmp_path / "nothing")
    damaged = written(tmp_path / "adapter")
    (damaged / TENSORS).write_bytes(b"damaged")
    with pytest.raises(ConfigError) as error:
        convert(model, tmp_path / "merged", adapter=damaged)
    assert str(damaged) in error.value.expected


@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2}, {"pipeline": 2}, {"expert": 2}, {"vocab_multiple": 64}, {"layers": Layers.transformer_engine}],
    ids=lambda layout: next(iter(layout)),
)
def test_a_layout_beside_an_adapter_is_refused(model: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    """The target is a Hugging Face directory, which has no layout."""
    [(option, value)] = layout.items()
    with pytest.raises(ConfigError) as error:
        convert(model, tmp_path / "merged", adapter=written(tmp_path / "adapter"), **layout)
    assert error.value.found == f"--{option.replace('_', '-')} {value}"
    assert not (tmp_path / "merged").exists()
