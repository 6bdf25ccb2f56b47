"""Brings a sealed version from the arena to every replica."""
