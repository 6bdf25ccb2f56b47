"""Answers judged by hand, a table for each reward that compares answers."""
