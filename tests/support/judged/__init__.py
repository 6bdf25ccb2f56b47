"""Hand-judged answers: a table for each reward that compares answers."""
