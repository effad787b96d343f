"""Checks the device of this machine: `python tools/device smoke|full|STEP... [--device cuda]`."""

import sys
from pathlib import Path

# It is run as a directory, which is then where imports are looked for; it is a package beside it.
ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT / "tools")
sys.path[1:1] = [str(ROOT / name) for name in ("server", "generated", "tests")]

from device.command import main  # noqa: E402

sys.exit(main())
