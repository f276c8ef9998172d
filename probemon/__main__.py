"""`python -m probemon COMMAND`."""

from probemon.cli import main

main()
