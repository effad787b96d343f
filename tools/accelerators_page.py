"""Write the tables of GPUs and TPUs in docs/, or prove that they are fresh (`--check`).

    python tools/accelerators_page.py [--check]

The kinds of devices are those of the server. `tools/accelerator_sizes.py` measured the memory of
programs and stores it in docs/measurements/accelerators.json; each row must agree with the server's
reservation to 1 %, or give the reason for the difference.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from xlaserve.cli.sizes import format_bytes
from xlaserve.runtime.devices.target_kinds import TARGETS

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "accelerators.md"
SIZES = DOCS / "measurements" / "accelerators.md"
MEASURED = DOCS / "measurements" / "accelerators.json"
TOLERANCE = 0.01

_NAMES = {"cuda": "GPU", "tpu": "TPU", "cpu": "CPU"}


@dataclass(frozen=True, slots=True)
class Row:
    """The memory that one model needs on one device of a target, in bytes."""

    model: str
    target: str
    batches: str
    """The compiled batch sizes."""
    parameters: int
    """Bytes of the parameters in the compiler's layout."""
    execution: int
    """Inputs, outputs and temporaries of the largest program, for one execution."""
    compiled: int
    """Total bytes according to the compiler, including all executions in flight."""
    reserved: int
    """The bytes that a server reserves."""
    told: int = 0
    """Bytes that the server reports before the first load; 0 if not measured."""
    why: str = ""
    """Why both figures differ by more than 1 %."""

    @property
    def difference(self) -> float:
        """Return the relative difference of the reservation from the compiler's figure."""
        return self.reserved / self.compiled - 1 if self.compiled else float(bool(self.reserved))

    @property
    def foretold(self) -> str:
        """Return the reported size as a multiple of the reservation."""
        return f"{self.told / self.reserved:.2f}" if self.told else ""


def measured() -> list[Row]:
    """Return the stored rows."""
    return [Row(**row) for row in json.loads(MEASURED.read_text())] if MEASURED.exists() else []


def keep(rows: Iterable[Row]) -> None:
    """Store rows, replacing those of the same models and targets."""
    known = {(row.model, row.target): row for row in (*measured(), *rows)}
    order = list(TARGETS)
    kept = sorted(known.values(), key=lambda row: (row.model, order.index(row.target)))
    document = [{field.name: getattr(row, field.name) for field in fields(Row)} for row in kept]
    MEASURED.write_text(json.dumps(document, indent=1) + "\n")


def problems(rows: Sequence[Row]) -> Iterator[str]:
    """Yield each unexplained difference, and each reservation that is too small."""
    if not rows:
        yield "nothing was measured"
    for row in rows:
        if abs(row.difference) > TOLERANCE and not row.why:
            yield f"{row.model} on {row.target}: {row.difference:.1%} difference without a reason"
        if row.reserved < row.compiled * (1 - TOLERANCE):
            yield f"{row.model} on {row.target}: reserved less than the compiler's figure"


def _kinds() -> Iterator[str]:
    yield "| target | devices per host | memory per device | source of the numbers |"
    yield "|---|---|---|---|"
    for row in TARGETS.values():
        counts = ", ".join(map(str, row.counts))
        memory = format_bytes(row.memory_bytes) if row.memory_bytes else "the host's"
        kind = row.kind or _NAMES[row.platform]
        yield f"| `{row.name}` | {counts} x {kind} | {memory} | {row.verified} |"


def _sizes(rows: Iterable[Row]) -> Iterator[str]:
    yield (
        "| model | target | batches | parameters | one execution | compiler's figure | reserved "
        "| difference | reported / reserved | reason |"
    )
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|---|"
    for row in rows:
        sizes = (row.parameters, row.execution, row.compiled, row.reserved)
        cells = [row.model, row.target, row.batches, *map(format_bytes, sizes)]
        yield f"| {' | '.join(cells)} | {row.difference:+.2%} | {row.foretold} | {row.why} |"


def page(text: str, name: str, lines: Iterable[str]) -> str:
    """Return the page with the named table regenerated."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"there is no place for the table of {name}")
    return f"{before}{begin}\n" + "\n".join(lines) + f"\n\n{end}{after}"


def stale() -> dict[Path, str]:
    """Return the pages whose tables are stale, each with its new text."""
    made = {
        PAGE: page(PAGE.read_text(), "kinds", _kinds()),
        SIZES: page(SIZES.read_text(), "sizes", _sizes(measured())),
    }
    return {path: text for path, text in made.items() if text != path.read_text()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if not fresh")
    asked = parser.parse_args()
    found = list(problems(measured()))
    for problem in found:
        print(problem)
    old = stale()
    if not asked.check:
        for path, text in old.items():
            path.write_text(text)
        return int(bool(found))
    for path in old:
        print(f"{path.relative_to(DOCS.parent)} is stale: run tools/accelerators_page.py")
    return int(bool(found or old))


if __name__ == "__main__":
    sys.exit(main())
