"""Tools for data without an environment: built in, and in Python files."""
