"""Experiment trackers: each is a module and a row in `protocol.TRACKERS`."""
