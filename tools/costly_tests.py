"""Write tests/costly.tsv, the tests that `tox run` leaves to `tox run -e costly`.

    pytest -m "not large and not slow" -n 2 --costs costs.jsonl
    python tools/costly_tests.py costs.jsonl --rest 330

The remaining tests take at most the given number of CPU seconds: the functions with the most
expensive tests are listed until that is true. CPU time on a busy machine is up to twice that on a
quiet one, and the first test of a process pays for caches that later ones use.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent / "tests" / "costly.tsv"
HEADING = "test\tseconds of the processor\ttests"


def function_of(test: str) -> str:
    """Return the name of a test without its parameters, as listed in the table."""
    return test.partition("[")[0]


def named() -> frozenset[str]:
    """Return the functions listed in the table."""
    rows = TABLE.read_text().splitlines()[1:]
    return frozenset(row.partition("\t")[0] for row in rows)


def costs(lines: Iterable[str]) -> Mapping[str, list[float]]:
    """Return the cost of each function's tests; only the last run of a test counts."""
    tests = dict(json.loads(line) for line in lines)
    functions = defaultdict(list)
    for test, seconds in tests.items():
        functions[function_of(test)].append(seconds)
    return functions


def costliest(functions: Mapping[str, Sequence[float]], rest: float) -> list[str]:
    """Return the functions to leave out so that the others take at most `rest` seconds."""
    left = sum(map(sum, functions.values()))
    chosen = []
    for name in sorted(functions, key=lambda name: -_mean(functions[name])):
        if left <= rest:
            break
        left -= sum(functions[name])
        chosen.append(name)
    return sorted(chosen)


def table(functions: Mapping[str, Sequence[float]], rest: float) -> str:
    """Return the text of the table."""
    rows = (
        f"{name}\t{sum(functions[name]):.1f}\t{len(functions[name])}"
        for name in costliest(functions, rest)
    )
    return "\n".join((HEADING, *rows)) + "\n"


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="what runs with --costs have written")
    parser.add_argument("--rest", type=float, required=True, help="seconds that `tox run` may take")
    options = parser.parse_args(arguments)
    lines = [line for file in options.files for line in file.read_text().splitlines()]
    TABLE.write_text(table(costs(lines), options.rest))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
