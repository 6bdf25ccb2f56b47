"""Versions of the weights: their arrival, staging, swap and relay."""
