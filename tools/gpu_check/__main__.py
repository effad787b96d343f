"""Checks the device of this machine: `python tools/gpu_check [--device cuda] [--json FILE]`."""

import sys
from pathlib import Path

# It is run as a directory, which is then where imports are looked for; it is a package beside it.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from gpu_check.command import main  # noqa: E402

sys.exit(main())
