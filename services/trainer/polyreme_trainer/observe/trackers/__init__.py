"""Experiment trackers: a file and a row in `protocol.TRACKERS` for each."""
