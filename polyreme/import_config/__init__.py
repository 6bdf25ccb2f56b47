"""Configurations of other systems as ours: one table of keys per system, and one engine that applies it."""
