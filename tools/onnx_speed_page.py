"""The table of execution times compared with onnxruntime, and its section in the docs."""

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
    """The median seconds per execution of one model and batch."""

    title: str
    batch: int
    ours: float
    theirs: float
    piece: int
    """Rows per piece; equal to the batch if it is executed whole."""

    @property
    def ratio(self) -> float:
        """Return our time relative to onnxruntime's."""
        return self.ours / self.theirs


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return exp(fsum(map(log, ratios)) / len(ratios))


def line(row: Row) -> str:
    """Return the table line of a row."""
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
    """Replace the text between the markers of a page; raises ValueError if they are missing."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"expected '{BEGIN}' and '{END}', each once, in {page}")
    lines = "\n".join(map(line, rows))
    said = summary(rows)
    section = f"{BEGIN}\n\n{HEAD}\n{lines}\n\n{said[0].upper()}{said[1:]}.\n\n{END}"
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    page.write_text(pattern.sub(lambda _: section, text))
