"""Gateways with short polling intervals and generous timeouts for slow machines."""

import pytest

from polyreme.gateway import replicas as gateway_replicas


@pytest.fixture(autouse=True)
def polls_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_replicas, "POLL_INTERVAL", 0.02)
    monkeypatch.setattr(gateway_replicas, "POLL_TIMEOUT", 300.0)
