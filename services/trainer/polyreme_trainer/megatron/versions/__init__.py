"""Versions of the actor, written into the arena."""
