"""Environments of verifiers (0.4): its env server runs the episodes, whose agents ask for turns at a session address."""
