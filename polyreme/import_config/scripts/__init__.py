"""Python programs that configure a trainer of TRL: read as a syntax tree, never executed."""
