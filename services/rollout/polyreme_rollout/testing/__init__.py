"""Simulated replicas, for tests and scale runs. The engine is also an entry point, `rollout.engine: simulated`."""
