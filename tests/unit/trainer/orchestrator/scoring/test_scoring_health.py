"""The conditions under which scoring as a whole counts as down."""

from polyreme_trainer.orchestrator.scoring.reward_client import ScoringHealth


def test_health() -> None:
    health = ScoringHealth(outage_timeout=10.0)
    assert not health.waits(0.0)
    health.failed(5.0, "group 1")
    health.failed(6.0, "group 1")
    assert not health.waits(6.0)
    health.failed(8.0, "group 2")
    assert health.waits(14.9) and not health.waits(15.0)
    health.succeeded()
    assert not health.waits(8.0)
    health.failed(8.0)
    assert health.waits(8.0)
