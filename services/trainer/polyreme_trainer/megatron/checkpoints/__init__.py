"""Checkpoints: written in the background, verified, loaded in any layout."""
