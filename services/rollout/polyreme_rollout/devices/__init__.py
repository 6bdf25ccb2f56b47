"""Devices that a replica shares: with other replicas at the start, with the learner in a colocated run."""
