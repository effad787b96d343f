"""Check the types with mypy and with pyright, both at once: each keeps one core busy."""

import subprocess
import sys

CHECKERS = (
    ("mypy", "server", "tests", "tools"),
    ("pyright",),
)


def main() -> int:
    """Print what each says, one after the other, and return how many are not content."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in CHECKERS
    ]
    refused = 0
    for command, process in zip(CHECKERS, running, strict=True):
        said, _ = process.communicate()
        print(f"{' '.join(command)}: {said}", flush=True)
        refused += process.returncode != 0
    return refused


if __name__ == "__main__":
    sys.exit(main())
