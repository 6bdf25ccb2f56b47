"""`python -m polyreme` runs the `polyreme` command with this interpreter."""

from polyreme.cli.main import main

main()
