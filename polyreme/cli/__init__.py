"""The `polyreme` command line."""
