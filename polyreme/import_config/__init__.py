"""Imports configurations of other systems: one table of keys per system, and one engine that applies it."""
