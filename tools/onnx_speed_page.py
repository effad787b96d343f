"""The table of executions beside onnxruntime, as text and between its markers in the docs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from pathlib import Path

HEAD = "| model | batch | ms | ms of onnxruntime | ratio | piece |\n|---|---:|---:|---:|---:|---:|"
BEGIN = "<!-- onnxruntime: written by tools/onnx_speed.py -->"
END = "<!-- end of onnxruntime -->"


@dataclass(frozen=True, slots=True)
class Row:
    """The median seconds of an execution of one model and batch."""

    title: str
    batch: int
    ours: float
    theirs: float
    piece: int
    """Rows of the pieces in which it is executed here; the batch where it is executed whole."""

    @property
    def ratio(self) -> float:
        """Return our time in parts of that of onnxruntime."""
        return self.ours / self.theirs


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return exp(fsum(map(log, ratios)) / len(ratios))


def line(row: Row) -> str:
    """Return the line of a row."""
    times = f"{row.ours * 1e3:.2f} | {row.theirs * 1e3:.2f} | {row.ratio:.2f}"
    return f"| {row.title} | {row.batch} | {times} | {row.piece} |"


def summary(rows: Sequence[Row]) -> str:
    """Return the geometric mean of the ratios, and the row with the largest."""
    worst = max(rows, key=lambda row: row.ratio)
    mean = geometric_mean([row.ratio for row in rows])
    return (
        f"geometric mean {mean:.2f}, most {worst.ratio:.2f} ({worst.title}, batch of {worst.batch})"
    )


def write(rows: Sequence[Row], page: Path) -> None:
    """Replace what is between the markers of a page; raises ValueError where they are not there."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"expected '{BEGIN}' and '{END}', each once, in {page}")
    lines = "\n".join(map(line, rows))
    said = summary(rows)
    section = f"{BEGIN}\n\n{HEAD}\n{lines}\n\n{said[0].upper()}{said[1:]}.\n\n{END}"
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    page.write_text(pattern.sub(lambda _: section, text))
