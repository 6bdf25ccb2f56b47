"""Samples as packed micro-batches: flat per-token arrays, cut for attention and for context ranks."""
