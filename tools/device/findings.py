"""The findings of one run on a device, appended to a file one at a time."""

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gpu_check.tolerances import allowed, far

Row: TypeAlias = dict[str, Any]
FAILED = "FAILED"
_SHOWN = 600


class Findings:
    """Appends the findings of a step to `results.jsonl`, and reads those of earlier steps."""

    def __init__(self, path: Path, step: str = "") -> None:
        self._path = path
        self._step = step

    def add(self, name: str, **values: Any) -> Row:
        """Write one finding; a value out of bounds makes it a failure."""
        row: Row = {"step": self._step, "name": name, "at": round(time.time(), 1), **values}
        if why := wrong(values):
            row.setdefault(FAILED, why)
        with self._path.open("a") as file:
            file.write(json.dumps(row, default=lambda value: repr(value)[:300]) + "\n")
        print(json.dumps(row, default=repr)[:_SHOWN], flush=True)
        return row

    def answer(self, name: str, found: Any, expected: Any, *, depth: int = 1, **more: Any) -> None:
        """Write an answer's error, and the tolerance for `depth` products of its datatype."""
        at_most = allowed(np.asarray(expected).dtype, depth)
        self.add(name, relative=far(found, expected), at_most=at_most, **more)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Turn an exception in the block into a finding, and continue."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(name, **{FAILED: f"{type(error).__name__}: {error}"[:_SHOWN]})
        finally:
            self.add(f"{name} took", seconds=round(time.perf_counter() - began, 2))

    def rows(self) -> list[Row]:
        """Return all findings of all steps so far, without truncated lines."""
        found: list[Row] = []
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def earlier(self, step: str, name: str) -> Row:
        """Return the last finding of this name, or an empty row."""
        found = (row for row in reversed(self.rows()) if (row["step"], row["name"]) == (step, name))
        return next(found, {})


def wrong(values: Row) -> str:
    """Return why a finding is a failure, or an empty string."""
    relative = values.get("relative")
    # Written so that NaN fails as well.
    if relative is not None and not relative <= values["at_most"]:
        return f"off by {relative:.3g} of the largest number, expected {values['at_most']:.3g}"
    for name, expected in (("left", 0), ("same", True), ("refused", True)):
        if name in values and values[name] is not None and values[name] != expected:
            return f"{name}: expected {expected}, got {values[name]}"
    return ""


def summary(rows: list[Row]) -> Iterator[str]:
    """Yield the failures, then one line per figure."""
    for row in rows:
        if FAILED in row or row.get("rc"):
            said = row.get(FAILED) or f"ended with {row['rc']} after {row.get('seconds')} s"
            yield f"!! {row['step']} {row['name']}: {str(said)[:300]}"
    for row in rows:
        if not row["name"].endswith(" took"):
            values = {key: row[key] for key in row if key not in ("step", "name", "at")}
            shown = " ".join(f"{key}={value}" for key, value in values.items())
            yield f"{row['step']:13} {row['name']:32} {shown[:230]}"
