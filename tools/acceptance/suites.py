"""Rows covered by the test suite, run in sizes too large for the suite itself."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from acceptance.figures import Outcome

_ROOT = Path(__file__).resolve().parents[2]
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")
_LONGEST_SECONDS = 10_800


def run_tests(
    folder: Path, *, tests: Sequence[str], note: str = "", **environment: object
) -> Outcome:
    """Run tests, with the number of messages, sequences and seconds set through the environment."""
    given = {name.upper(): str(value) for name, value in environment.items()}
    limits = ["--timeout", str(_LONGEST_SECONDS), "-o", "faulthandler_timeout=0"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *limits, *tests],
        cwd=_ROOT,
        env=os.environ | given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    (folder / "pytest.log").write_text(ended.stdout)
    counts = {what: int(count) for count, what in _COUNT.findall(ended.stdout)}
    outcome = Outcome()
    if note:
        outcome.note("size", note)
    outcome.at_least("tests that passed", counts.get("passed", 0), 1)
    failed = counts.get("failed", 0) + counts.get("error", 0)
    outcome.at_most("tests that failed", failed, 0)
    outcome.note("tests that were skipped", counts.get("skipped", 0))
    # A run that was cut off has no counts.
    outcome.add("status of pytest", ended.returncode, "0", holds=ended.returncode == 0)
    if ended.returncode:
        print(ended.stdout[-4000:], flush=True)
    return outcome
