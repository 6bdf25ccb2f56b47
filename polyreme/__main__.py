"""`python -m polyreme`: the same command, by this interpreter."""

from polyreme.cli import main

main()
