"""Writes the files of a first run."""
