"""Run onnx's own test suite through our converter, and print passed, refused and wrong cases.

Exits with 1 if a case is wrong, or fewer pass than before. Needs the `test` dependency group.
"""

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

# Workers run cases in parallel, each limited to one core.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")


def main() -> int:
    """Run the suite; return 1 if a case is wrong or fewer pass than before."""
    from support import onnx_cases, onnx_suite

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--third", action="store_true", help="a third of each operator's cases")
    parser.add_argument("--only", default="", help="those with this in their name")
    parser.add_argument("--list", action="store_true", help="name each that did not pass")
    arguments = parser.parse_args()
    cases = [case for case in onnx_suite.everything() if arguments.only in case.name]
    if arguments.third:
        cases = list(onnx_suite.third(cases))
    began = time.monotonic()
    outcomes = onnx_suite.outcomes(cases, arguments.processes)
    seconds = time.monotonic() - began
    counts = Counter(said.partition(":")[0] for said in outcomes.values())
    for why, count in Counter(outcomes.values()).most_common():
        if why.startswith("refused"):
            print(f"{count:5} {why}")
    for name, said in outcomes.items():
        if said.startswith("FAILED") or (arguments.list and not said.startswith(onnx_cases.PASSED)):
            print(f"{name}: {said}")
    print(
        f"{len(cases)} cases in {seconds:.0f} s: {counts['passed']} passed, "
        f"{counts['refused']} refused, {counts['differs']} other than onnx's on purpose, "
        f"{counts['FAILED']} wrong"
    )
    held = Counter(outcomes.values())[onnx_cases.HELD]
    print(f"held constant: {held} of those that passed, whose inputs decide shapes")
    is_whole = len(cases) == len(onnx_suite.everything())
    too_few = is_whole and counts["passed"] < onnx_suite.LEAST_PASSED
    if too_few:
        print(f"fewer than the {onnx_suite.LEAST_PASSED} that passed before")
    return int(bool(counts["FAILED"]) or too_few)


if __name__ == "__main__":
    sys.exit(main())
