"""`python -m xlaserve`, in case the script is not on PATH."""

from xlaserve.cli import main

main()
