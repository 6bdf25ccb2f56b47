"""`python -m polyreme`: the same command, by this interpreter."""

from polyreme.cli.main import main

main()
