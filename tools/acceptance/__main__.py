"""Checks rows of the acceptance table: `python tools/acceptance soak [--rows L1,M1] [--short]`."""

import sys
from pathlib import Path

# A directory run as a script is itself on sys.path; the package is importable from its parent.
_TOOLS = Path(__file__).resolve().parent.parent
sys.path[0] = str(_TOOLS)
sys.path.append(str(_TOOLS.parent / "tests"))

from acceptance.command import main  # noqa: E402

sys.exit(main())
