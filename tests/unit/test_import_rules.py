"""Rules for imports. They are read from the source (every import statement, also inside functions), and once from a live process."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "polyreme": ROOT / "polyreme",
    "polyreme_rollout": ROOT / "services" / "rollout" / "polyreme_rollout",
    "polyreme_reward": ROOT / "services" / "reward" / "polyreme_reward",
    "polyreme_environment": ROOT / "services" / "environment" / "polyreme_environment",
    "polyreme_trainer": ROOT / "services" / "trainer" / "polyreme_trainer",
}
SERVICES = tuple(name for name in PACKAGES if name != "polyreme")


@dataclass(frozen=True)
class Import:
    """`importer` (a dotted module) imports `imported`, at `line`."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def imports_of(module: str, source: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            assert node.module
            yield from (Import(module, f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


IMPORTS = [found for module, path in modules() for found in imports_of(module, path.read_text())]


def under(module: str, *packages: str) -> bool:
    """Whether a dotted name is one of the packages or inside one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def offenders(importers: tuple[str, ...], imported: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    """Imports of `imported` by modules under `importers`, except by those under `allowed`."""
    return [
        str(found)
        for found in IMPORTS
        if under(found.importer, *importers) and under(found.imported, *imported) and not under(found.importer, *allowed)
    ]


def test_the_rules_read_real_code() -> None:
    importers = {found.importer for found in IMPORTS}
    for package in PACKAGES:
        assert any(under(importer, package) for importer in importers), f"no import found in {package}"


def test_the_core_is_light() -> None:
    assert not offenders(("polyreme",), ("torch", "vllm", "megatron", "fastapi", "transformers", "tokenizers", *SERVICES))


def test_the_core_stays_light_when_all_of_it_is_loaded() -> None:
    names = [module for module, _ in modules() if under(module, "polyreme") and not module.endswith("__main__")]
    script = "import importlib, sys\n" + "".join(f"importlib.import_module({name!r})\n" for name in names)
    script += f"print(*(sorted({{m.partition('.')[0] for m in sys.modules}} & {set(HEAVY)!r})))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True).stdout
    assert loaded.strip() == ""


HEAVY = ("torch", "vllm", "megatron", "fastapi", "transformers", "pyarrow", "datasets", "huggingface_hub", *SERVICES)


@pytest.mark.parametrize("service", SERVICES)
def test_services_do_not_import_each_other(service: str) -> None:
    assert not offenders((service,), tuple(other for other in SERVICES if other != service))


def test_orchestrator_and_learner_meet_only_in_redis() -> None:
    orchestrator, learner = "polyreme_trainer.orchestrator", "polyreme_trainer.learner"
    assert not offenders((orchestrator,), (learner,))
    assert not offenders((learner,), (orchestrator,))


def test_the_orchestrator_and_the_supervisor_have_no_torch() -> None:
    light = (
        "orchestrator",
        "command",
        "checks",
        "memory",
        "stages",
        "launch.trainer_process",
        "launch.stage_process",
        "observe",
        "data",
    )
    assert not offenders(tuple(f"polyreme_trainer.{name}" for name in light), ("torch", "megatron"))


def test_the_reward_service_has_torch_only_where_a_model_runs() -> None:
    model = ("polyreme_reward.model.classifier", "polyreme_reward.model.device")
    assert not offenders(("polyreme_reward",), ("torch", "transformers", "torch_npu"), allowed=model)
    importers = {found.importer for found in IMPORTS if under(found.imported, *model)}
    assert importers == {"polyreme_reward.model.worker", "polyreme_reward.model.classifier"}


def test_each_framework_has_one_place() -> None:
    assert not offenders(tuple(PACKAGES), ("vllm",), allowed=("polyreme_rollout.engine",))
    assert not offenders(tuple(PACKAGES), ("megatron",), allowed=("polyreme_trainer.megatron",))
    devices = ("polyreme_trainer.megatron.device", "polyreme_rollout.device", "polyreme_reward.model.device")
    assert not offenders(tuple(PACKAGES), ("torch_npu",), allowed=devices)


def test_redis_commands_are_in_experience() -> None:
    clients = [found for found in IMPORTS if under(found.imported, "redis") and not found.imported.endswith(".Redis")]
    assert not [str(found) for found in clients if not under(found.importer, "polyreme.experience")]
    command = re.compile(
        r"redis\.(x(add|read|range)|h(set|get|mget|getall)|z\w+|set|get|delete|eval|evalsha|pipeline|execute_command)\("
    )
    for module, path in modules():
        if not under(module, "polyreme.experience"):
            assert not command.search(path.read_text()), f"{module} talks to Redis itself"


def test_planners_and_algorithms_are_pure() -> None:
    pure = (
        "polyreme_trainer.algorithms",
        "polyreme_trainer.megatron.huggingface.hf_mapping",
        "polyreme_trainer.megatron.batches.batch",
        "polyreme_trainer.orchestrator.generation.partial_rollouts",
        "polyreme_trainer.orchestrator.replicas.idle_time",
        "polyreme_trainer.orchestrator.replicas.straggler_detection",
        "polyreme_trainer.orchestrator.replicas.router",
        "polyreme.display.summary",
        "polyreme.rundir.progress",
        "polyreme.weights.manifest",
    )
    present = {module for module, _ in modules()}
    assert all(any(under(module, name) for module in present) for name in pure)
    assert not offenders(
        pure, ("time", "datetime", "random", "secrets", "os", "pathlib", "socket", "asyncio", "subprocess", "redis", "grpc")
    )
    for module, path in modules():
        if under(module, *pure):
            assert not re.search(
                r"\b(open\(|np\.random\.(rand|randn|randint|choice|seed)|torch\.(rand|randn|randperm)\()", path.read_text()
            )


def test_nothing_is_pickled() -> None:
    """A program's sandbox gets its code compiled, which is marshal's form; nothing is ever read from it in that form.

    Checkpoints of Megatron are pickles. The one module that reads them creates only tensors and containers.
    """
    written = ("polyreme.isolation.sandbox.program", "polyreme_trainer.convert.pickles")
    assert not offenders(tuple(PACKAGES), ("pickle", "cloudpickle", "dill", "marshal", "shelve"), allowed=written)


CORE_ARROWS = {
    "cli": {
        *("page", "display", "rundir", "hub", "terminal", "gateway", "experience"),
        *("import_config", "dataset", "net", "config", "weights", "process", "errors"),
    },
    "page": {"display", "rundir", "experience", "net", "config", "process", "errors"},
    "display": {"rundir", "terminal", "experience", "dataset", "config", "errors"},
    "rundir": {"hub", "terminal", "experience", "net", "dataset", "config", "errors"},
    "terminal": {"config", "errors"},
    "gateway": {"experience", "net", "config", "process", "errors"},
    "experience": {"net", "config", "process", "errors", "api"},
    "net": {"config", "process", "errors", "api"},
    "weights": {"errors", "api"},
    "hub": {"config", "errors"},
    "import_config": {"config", "errors"},
    "dataset": {"config", "errors"},
    "isolation": {"process", "errors"},
    "config": {"errors"},
    "process": {"errors"},
    "errors": set(),
    "api": set(),
}
"""The core's rooms and their imports, from the top down. `errors` is a module, `api` the generated contracts."""

TRAINER_ARROWS = {
    "orchestrator": {"algorithms", "data"},
    "observe": set(),
    "stages": {"algorithms", "learner", "data", "observe"},
    "memory": {"megatron", "stages"},
    "megatron": {"algorithms", "learner", "data", "weight_sync"},
    "algorithms": set(),
    "data": set(),
}
"""Trainer rooms that may import only these rooms."""

MEGATRON_ARROWS = {
    "models": {"parallel", "layers", "experts", "offload", "batches", "huggingface", "device", "mcore"},
    "layers": {"parallel", "experts", "batches", "huggingface", "mcore"},
    "experts": {"parallel", "batches", "huggingface", "mcore"},
    "parallel": {"batches", "huggingface", "device", "mcore"},
    "batches": {"huggingface", "mcore"},
    "offload": {"mcore"},
    "huggingface": {"atomic"},
    "versions": {"models", "huggingface"},
    "training": {"models", "parallel", "offload", "batches", "huggingface", "mcore"},
}
"""Rooms of `megatron` that may import only these rooms and modules of it."""


PROTOCOLS = ("engine", "gates", "leader", "learning_rate", "saving")
"""Modules of the trainer's `learner` that the rooms below it implement or use. Of `learner`, they import only each other."""


def learner_part(module: str) -> str:
    """A trainer module's room, where the protocols and the entry point of `learner` are rooms of their own."""
    name = module.removeprefix("polyreme_trainer.learner.").partition(".")[0]
    if name in PROTOCOLS:
        return "protocols"
    return name if name == "__main__" else room(module, "polyreme_trainer")


def room(module: str, package: str) -> str:
    """The part of a dotted name directly below `package`; empty for the package itself."""
    return module.removeprefix(package).lstrip(".").partition(".")[0]


def arrows(package: str) -> dict[str, set[str]]:
    """The imports between the rooms of a package: room -> imported rooms."""
    found: dict[str, set[str]] = {}
    for each in IMPORTS:
        if under(each.importer, package) and under(each.imported, package):
            source, target = room(each.importer, package), room(each.imported, package)
            if source != target and target in ROOMS[package]:
                found.setdefault(source, set()).add(target)
    return found


HOUSES = (*PACKAGES, "polyreme_trainer.megatron", "polyreme_trainer.orchestrator")
"""The packages that have rooms."""
ROOMS = {package: {room(module, package) for module, _ in modules() if under(module, package)} - {""} for package in HOUSES}


def test_the_core_is_drawn_as_it_is() -> None:
    """Every import between rooms of the core is an arrow of the drawing, which has no upward arrow and no cycle."""
    actual = {source: targets for source, targets in arrows("polyreme").items() if source != "__main__"}
    extra = {source: targets - CORE_ARROWS.get(source, set()) for source, targets in actual.items()}
    assert not {source: targets for source, targets in extra.items() if targets}
    order = list(CORE_ARROWS)
    assert all(order.index(target) > order.index(source) for source, targets in CORE_ARROWS.items() for target in targets)


def test_the_trainers_lower_rooms_import_nothing_above_them() -> None:
    actual = arrows("polyreme_trainer")
    extra = {source: actual.get(source, set()) - allowed for source, allowed in TRAINER_ARROWS.items()}
    assert not {source: targets for source, targets in extra.items() if targets}


def test_the_models_rooms_import_nothing_above_them() -> None:
    actual = arrows("polyreme_trainer.megatron")
    extra = {source: actual.get(source, set()) - allowed for source, allowed in MEGATRON_ARROWS.items()}
    assert not {source: targets for source, targets in extra.items() if targets}


def test_services_do_not_use_the_command_line() -> None:
    """What a service shares with the commands is in the core's rooms: a service works without `polyreme.cli`."""
    assert not offenders(SERVICES, ("polyreme.cli",))


def test_weight_sync_and_stages_use_only_the_learners_protocol_and_leader() -> None:
    above = tuple(f"polyreme_trainer.learner.{name}" for name in ("loop", "run_client", "__main__"))
    assert not offenders(("polyreme_trainer.weight_sync", "polyreme_trainer.stages", "polyreme_trainer.megatron"), above)


@pytest.mark.parametrize("package", HOUSES)
def test_no_circle_of_rooms(package: str) -> None:
    """The rooms of a package can be ordered so that each imports only later ones."""
    imported: dict[str, set[str]] = {}
    for each in IMPORTS:
        if under(each.importer, package) and under(each.imported, package) and room(each.imported, package) in ROOMS[package]:
            part = learner_part if package == "polyreme_trainer" else lambda module: room(module, package)
            imported.setdefault(part(each.importer), set()).add(part(each.imported))
    imported = {name: targets & imported.keys() - {name} for name, targets in imported.items() if name}
    while leaves := {name for name, targets in imported.items() if not targets}:
        imported = {name: targets - leaves for name, targets in imported.items() if name not in leaves}
    assert not imported


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_of_imports(package: str) -> None:
    """No module imports itself through others, not even inside functions."""
    names = {module for module, _ in modules() if under(module, package)}
    imported: dict[str, set[str]] = {name: set() for name in names}
    for each in IMPORTS:
        if each.importer in names:
            target = each.imported if each.imported in names else each.imported.rpartition(".")[0]
            if target in names and target != each.importer:
                imported[each.importer].add(target)
    while leaves := {name for name, targets in imported.items() if not targets}:
        imported = {name: targets - leaves for name, targets in imported.items() if name not in leaves}
    while tops := imported.keys() - {target for targets in imported.values() for target in targets}:
        imported = {name: targets for name, targets in imported.items() if name not in tops}
    assert not imported
