"""Fixtures for tests of a single learner rank."""

from collections.abc import Iterator

import pytest

from polyreme_trainer.learner.leader import Ranks


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """One rank, without others."""
    ranks = Ranks()
    yield ranks
    ranks.close()
