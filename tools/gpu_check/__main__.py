"""Checks the device of this machine: `python tools/gpu_check [--device cuda] [--json FILE]`."""

import sys
from pathlib import Path

# A directory run as a script is itself on sys.path; the package is importable from its parent.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from gpu_check.command import main  # noqa: E402

sys.exit(main())
