"""Soak the model runtime of a mesh, and print what it leaves behind.

A client that behaves like ModelMesh moves 200 models through a capacity of 20, over TCP and a unix
socket at the same time. Exits with 1 if a model was served after its unload or left in memory, or
if the capacity was ever exceeded. Needs the `test` dependency group.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from xlaserve.process import log

_TESTS = Path(__file__).resolve().parent.parent / "tests"


def main() -> int:
    """Parse the arguments and soak; return 1 if a rule was violated or memory was left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="makes the choices repeatable")
    arguments = parser.parse_args()
    sys.path.append(str(_TESTS))
    from support.soak import soak

    log.configure("error")
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(soak(arguments.seconds, Path(folder), arguments.seed))
    print(report)
    return int(bool(report.violations) or report.before != report.after)


if __name__ == "__main__":
    sys.exit(main())
