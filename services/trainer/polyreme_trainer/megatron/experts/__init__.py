"""Mixtures of experts: their layers, and how tokens are routed."""
