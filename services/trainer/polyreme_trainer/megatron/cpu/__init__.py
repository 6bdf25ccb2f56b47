"""Layers tuned for CPU."""
