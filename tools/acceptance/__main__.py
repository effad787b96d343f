"""Checks rows of the acceptance table: `python tools/acceptance soak [--rows L1,M1] [--short]`."""

import sys
from pathlib import Path

# It is run as a directory, which is then where imports are looked for; it is a package beside it.
_TOOLS = Path(__file__).resolve().parent.parent
sys.path[0] = str(_TOOLS)
sys.path.append(str(_TOOLS.parent / "tests"))

from acceptance.command import main  # noqa: E402

sys.exit(main())
