"""The rollout service's check before a run starts: its engine is one that an installed distribution declares.

Invariant: the check imports no engine.
"""

from collections.abc import Iterator

from polyreme.config.run import RunConfig
from polyreme.errors import PolyremeError
from polyreme_rollout.engine.load import find_engine


def check(config: RunConfig) -> Iterator[str | PolyremeError]:
    """Yields errors about a run's replicas."""
    find_engine(config.rollout.engine)
    yield from ()
