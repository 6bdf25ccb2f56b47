"""Evaluations: when they are due, their answers, their metrics."""
