"""A simulated engine and simulated replicas, for tests and scale runs."""
