"""Replicas: who is there, who gets the next call, who is slow."""
