"""Runs `python -m xlaserve.cli`, if the script is not on the path."""

from xlaserve.cli import main

main()
