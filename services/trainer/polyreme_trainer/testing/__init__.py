"""Simulated parts of the trainer, for tests and scale runs."""
