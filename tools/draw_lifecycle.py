"""Draw the lifecycle of a model version from its table into docs/lifecycle.md (or `--check`)."""

import argparse
import sys
from pathlib import Path

from xlaserve.core.residence.lifecycle import TRANSITIONS, State

PAGE = Path(__file__).resolve().parent.parent / "docs" / "lifecycle.md"
_INTRODUCTION = """# The lifecycle of a model version

Made by `tools/draw_lifecycle.py` from the table in
`server/xlaserve/core/residence/lifecycle.py`. What is not drawn is forbidden. Requests are
answered in READY and RELOADING; the repository index shows RELOADING as READY.

```mermaid
stateDiagram-v2
"""


def page() -> str:
    """Return the whole page."""
    rows = [f"    [*] --> {State.UNAVAILABLE}"]
    rows += [f"    {before} --> {after}: {event}" for (before, event), after in TRANSITIONS.items()]
    return _INTRODUCTION + "\n".join(rows) + "\n```\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    fresh = PAGE.read_text() == page()
    print(f"docs/lifecycle.md is {'fresh' if fresh else 'stale: run tools/draw_lifecycle.py'}")
    return 0 if fresh else 1


if __name__ == "__main__":
    sys.exit(main())
