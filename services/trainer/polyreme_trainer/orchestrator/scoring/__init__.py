"""Scores: calls of reward servers and teachers, and whether they can be made."""
