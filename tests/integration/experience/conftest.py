"""A Redis server for a single test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from polyreme.experience.embedded_redis import EmbeddedServer


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may break."""
    with EmbeddedServer.start(tmp_path / "redis") as server:
        yield server
