"""Finds an inference engine by its name in the entry-point group `polyreme.engines`.

Invariant: only the chosen engine is imported.
"""

from importlib.metadata import EntryPoint, entry_points

from polyreme.errors import ConfigError
from polyreme.process.quick_imports import quick_imports
from polyreme_rollout.engine.protocol import EngineFactory

GROUP = "polyreme.engines"


def load_engine(name: str) -> EngineFactory:
    """The factory of the engine `name`. Raises ConfigError as `find_engine`."""
    with quick_imports():
        factory: EngineFactory = find_engine(name).load()
    return factory


def find_engine(name: str) -> EntryPoint:
    """The declaration of the engine `name`. Raises ConfigError for a name that no installed distribution declares."""
    points = entry_points(group=GROUP)
    found = [point for point in points if point.name == name]
    if not found:
        installed = ", ".join(sorted(point.name for point in points)) or "none"
        raise ConfigError(
            f"`rollout.engine` to name one of {installed}", f"{name!r}", "Fix `rollout.engine`, or install that engine."
        )
    return found[0]
