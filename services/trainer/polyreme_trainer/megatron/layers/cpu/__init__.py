"""Layers of the CPU."""
