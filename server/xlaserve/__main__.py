"""`python -m xlaserve`, for where the script is not on the path."""

from xlaserve.cli import main

main()
