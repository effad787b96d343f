"""Formats the page of the zoo, docs/measurements/models-that-work.md."""

from collections.abc import Sequence

from zoo_rows import Result, Row

_NOT_IN_IT = """\
## Not in the table

57 models were tried, and the table has those that ended well. Of the others

- voicefilter-embedder (an LSTM) imports with `--tolerance 0.1` alone, and its rows in a batch of
  three are 0.42 off. onnxruntime differs there from itself, by 0.48 between three rows together
  and each alone. Do not serve it in batches;
- a histogram-based boosting of scikit-learn agreed, but skl2onnx writes it with some versions of
  protobuf only;
- tinyocr's two, DNSMOS' three, AECMOS' two and wake-jarvis were not tried to their end.

Some rows have a tolerance of their own, for this reason:

| row | why |
|---|---|
| basic-pitch | 1e-3 of the largest number; on one input FP64 is nearer to ours than to theirs |
| magika | 1e-2: on one input ours is 7.7e-4 from FP64 and onnxruntime's 6.6e-3 |
| `--tolerance 0.1` | LSTMs of 8 bits: onnxruntime differs from itself by threads and rows |
| pp-ocr-v4-det, pp-ocr-v6-det | outputs of a sigmoid near 0 count as 0.005 |
| wake-marvin, wake-mycroft, wake-weather | the same |
"""

_HEADER = """\
# Models that work

Models out of packages, each imported by one command, served, and compared with onnxruntime.
`python tools/zoo.py` wrote this page: it downloads wheels, trains what is trained on the spot,
and runs each command below. `tox run -e zoo` does so in an environment of its own, and fails if an
answer is wrong or an import that worked is refused.

The difference is the largest of batches of 1, 3 and 8 rows over gRPC, twice each with other random
inputs, and of every size that the model is compiled for, in parts of the largest number of its
output. Models with a fixed shape are asked with that.
The times are milliseconds of a request of one row, the best of two seconds by turns: over gRPC, and
of onnxruntime in the process of the client, without a wire. Other work was on the two cores, and
more of it while some rows ran than others: they are no measure of speed, which
[performance](performance.md#imported-models-beside-onnxruntime) has.
Licences are as the metadata of the packages name them; those of the weights may be others.
"""


def page(rows: Sequence[tuple[Row, Result]]) -> str:
    """Return the page with all rows and their results."""
    worked = [(row, result) for row, result in rows if not result.refused and not result.wrong]
    others = [(row, result) for row, result in rows if result.refused or result.wrong]
    parts = [
        _HEADER,
        f"{len(worked)} of {len(rows)} models are served and agree.\n",
        _table(worked),
        "## The commands\n",
        "`FILE` is the file of the package, `NAME` the name in the table.\n",
        _commands(worked),
    ]
    parts.append(_NOT_IN_IT)
    if others:
        parts += ["## Refused\n", _refusals(others)]
    return "\n".join(parts)


def _table(rows: Sequence[tuple[Row, Result]]) -> str:
    lines = [
        "| model | task | package | licence | file | served | difference | batches | gRPC ms "
        "| onnxruntime ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row, result in rows:
        batches = ", ".join(map(str, result.batches)) if result.batches != (0,) else "fixed"
        cells = (
            *(row.name, row.does, result.package, result.licence),
            *(_size(result.file_bytes), _size(result.served_bytes)),
            *(f"{result.difference:.1e}" if result.difference else "0", batches),
            *(_milliseconds(result.ours_ms), _milliseconds(result.theirs_ms)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _commands(rows: Sequence[tuple[Row, Result]]) -> str:
    lines = [
        "| model | file | `xlaserve import FILE models/NAME ...` |",
        "|---|---|---|",
    ]
    for row, _ in rows:
        lines.append(f"| {row.name} | {_file(row)} | {_typed(row)} |")
    return "\n".join(lines) + "\n"


def _refusals(rows: Sequence[tuple[Row, Result]]) -> str:
    lines = ["| model | task | package | licence | command | reason |", "|---|---|---|---|---|---|"]
    for row, result in rows:
        reason = (result.refused or result.wrong).replace("|", "\\|")
        cells = (row.name, row.does, result.package, result.licence, _typed(row), reason)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _typed(row: Row) -> str:
    """Return a row's flags as code, or "no flag" if it needs none."""
    return f"`{row.options}`" if row.options else "no flag"


def _file(row: Row) -> str:
    return f"`{row.path}`" if row.package else f"trained: {row.path}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def _milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"
