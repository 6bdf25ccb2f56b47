"""Every name that the learner calls in packages for accelerators exists there with the passed parameters.

The packages do not run here: pip downloads their wheels, and the test reads their source. megatron-core 0.19 needs Python 3.12, which the
images of accelerators may have.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.device_packages import installed, pinned
from support.package_source import PackageSource, calls, definitions_of, methods_of

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "services" / "trainer" / "polyreme_trainer" / "megatron"
NEW = {"Attention.attend", *(f"Packing.{name}" for name in ("layout", "ends", "key_ends"))}
"""Methods of our classes that intentionally override nothing."""


def sources() -> Iterator[Path]:
    yield from sorted(OURS.rglob("*.py"))


def mistakes(package: PackageSource, imports: list[tuple[str, str]], state: str) -> list[str]:
    """The names that our source imports from `package`, overrides in its classes or passes in calls, and that do not exist there.

    Args:
        imports: (module, name) of `from module import name`.
        state: an imported module whose functions we call as attributes.
    """
    found = {name: package.find(module, name) for module, name in imports}
    wrong = [f"no {module}.{name}" for module, name in imports if found[name] is None]
    inside = str(found.pop(state))
    for path in sources():
        for name in attributes(path, state):
            found[name] = package.find(inside, name)
            wrong += [f"{path.name}: no {inside}.{name}"] if found[name] is None else []
    callables = {name: place for name, place in found.items() if isinstance(place, tuple)}
    for path in sources():
        for call in calls(path, set(callables)):
            parameters = package.parameters(*callables[call.name])
            unknown = [keyword for keyword in call.keywords if keyword not in parameters.names]
            if not parameters.open and (unknown or call.positional > len(parameters.names)):
                wrong.append(f"{call.where}: {call.name} does not take {unknown or call.positional}")
        for child, base, method in definitions_of(path, set(callables)):
            if f"{child}.{method}" not in NEW and not package.has_method(*callables[base], method):
                wrong.append(f"{path.name}: {child}.{method} overrides nothing in {base}")
    return wrong


def attributes(path: Path, module: str) -> set[str]:
    """The attributes of a name in a file: x.NAME."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == module}


def megatron_imports() -> list[tuple[str, str]]:
    nodes = ast.walk(ast.parse((OURS / "mcore.py").read_text()))
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core")]
    return [(str(node.module), alias.name) for node in froms for alias in node.names]


@pytest.mark.slow
def test_megatron_core_for_python_3_12_has_what_the_learner_calls() -> None:
    assert mistakes(pinned("megatron-core"), megatron_imports(), "parallel_state") == []


def test_the_installed_megatron_core_passes_the_same_check() -> None:
    assert mistakes(installed("megatron"), megatron_imports(), "parallel_state") == []


def test_the_check_finds_a_missing_name_a_parameter_and_a_method(tmp_path: Path) -> None:
    """The package of this test lacks three names."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "core.py").write_text(
        "class TransformerConfig:\n    num_layers: int\n\nclass TopKRouter:\n    def forward(self): ...\n"
    )
    imports = [("megatron.core", name) for name in ("TransformerConfig", "TopKRouter", "GPTModel", "parallel_state")]
    found = "\n".join(mistakes(PackageSource(tmp_path), imports, "parallel_state"))
    assert "no megatron.core.GPTModel" in found
    assert "TransformerConfig does not take" in found and "hidden_size" in found
    assert "ExpertRouter.gating overrides nothing" in found


OPTIMIZER_METHODS = {
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"): (
        "zero_grad_buffer",
        "scale_gradients",
        "start_param_sync",
    ),
    ("megatron.core.optimizer.optimizer", "MixedPrecisionOptimizer"): ("prepare_grads", "step_with_ready_grads"),
    ("megatron.core.optimizer.optimizer", "FP32Optimizer"): ("prepare_grads", "step_with_ready_grads"),
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer"): ("_get_model_param_range_map",),
}
"""What our optimizer calls of instances, which the check of imports does not see."""


@pytest.mark.slow
def test_megatron_core_for_python_3_12_has_what_the_optimizer_calls() -> None:
    check_optimizer(pinned("megatron-core"))


def test_the_installed_megatron_core_has_what_the_optimizer_calls() -> None:
    check_optimizer(installed("megatron"))


def check_optimizer(package: PackageSource) -> None:
    names = "".join(
        (OURS / f"{name}.py").read_text() for name in ("training/optimizer", "offload/optimizer_parts", "offload/fragments")
    )
    for (module, kind), methods in OPTIMIZER_METHODS.items():
        found = methods_of(package, module, kind)
        assert [name for name in methods if name not in found or f".{name}(" not in names] == [], kind
    place = package.find("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer")
    assert isinstance(place, tuple)
    source = ast.unparse(place[1])
    assert "self.model_chunks = model_chunks" in source and "model_chunk.start_param_sync()" in source


def test_torch_takes_the_call_of_its_packed_attention() -> None:
    place = installed("torch").find("torch.nn.attention.varlen", "varlen_attn")
    assert isinstance(place, tuple) and isinstance(place[1], ast.FunctionDef)
    positional = [each.arg for each in place[1].args.args]
    keywords = {each.arg for each in place[1].args.kwonlyargs}
    [call] = calls(OURS / "layers" / "accelerator.py", {"varlen_attn"})
    assert positional[: call.positional] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert set(call.keywords) <= keywords | set(positional[call.positional :])


@pytest.mark.slow
def test_torch_npu_has_what_the_device_module_calls() -> None:
    npu = pinned("torch-npu")
    assert npu.find("torch_npu.contrib", "transfer_to_npu") is not None
    nodes = [
        node for path in (OURS / "device.py", OURS / "probes" / "self_test.py") for node in ast.walk(ast.parse(path.read_text()))
    ]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _names_a_backend(node.value)}
    assert {"is_available", "set_device", "mem_get_info", "synchronize", "empty_cache", "max_memory_allocated"} <= used
    assert {name for name in used if npu.find("torch_npu.npu", name) is None} == set()


@pytest.mark.slow
def test_torch_npu_takes_the_call_of_its_packed_attention() -> None:
    """The kernel is not written in Python, so the test reads its signature from the documentation."""
    documentation = (pinned("torch-npu").root / "torch_npu/_op_plugin_docs.py").read_text()
    start = documentation.index("torch_npu.npu_fusion_attention(Tensor query")
    signature = documentation[start : documentation.index("->", start)]
    parameters = [each.split("=")[0].split()[-1].rstrip(")") for each in signature.partition("(")[2].split(",")]
    [call] = calls(OURS / "layers" / "accelerator.py", {"npu_fusion_attention"})
    assert set(call.keywords) <= set(parameters[call.positional :])
    assert parameters[: call.positional] == ["query", "key", "value", "head_num", "input_layout"]


def _names_a_backend(node: ast.expr) -> bool:
    """Whether this is `torch.npu`, or `getattr(torch, kind)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        return isinstance(node.args[0], ast.Name) and node.args[0].id == "torch"
    return isinstance(node, ast.Attribute) and node.attr == "npu"


@pytest.mark.slow
def test_transformer_engines_adam_keeps_its_step_elsewhere() -> None:
    """megatron-core uses it if it is installed, but our checkpoints read the step from the state of torch's Adam, see docs/cuda.md."""
    place = pinned("transformer-engine").find("transformer_engine.pytorch.optimizers", "FusedAdam")
    assert isinstance(place, tuple)
    assert "group['step']" in ast.unparse(place[1])
