"""`python -m probemon.cli COMMAND`."""

from probemon.cli import main

main()
