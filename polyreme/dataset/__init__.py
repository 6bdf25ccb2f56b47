"""Data files of every known format as rows, and the columns of a row."""
