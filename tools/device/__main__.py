"""Checks the device of this machine: `python tools/device smoke|full|STEP... [--device cuda]`."""

import sys
from pathlib import Path

# A directory run as a script is itself on sys.path; the package is importable from its parent.
ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT / "tools")
sys.path[1:1] = [str(ROOT / name) for name in ("server", "generated", "tests")]

from device.command import main  # noqa: E402

sys.exit(main())
