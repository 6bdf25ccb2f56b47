"""The commands of `polyreme`, a module each."""
