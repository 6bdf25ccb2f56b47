"""Environments of NeMo Gym (0.7): its agent runs the episodes, and asks for turns at a session address."""
