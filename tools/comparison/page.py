"""Writes figures and charts between the markers of docs/measurements/performance.md."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from comparison.charts import bar_chart
from comparison.contenders import OURS
from comparison.interleaving import Numbers
from comparison.results import Results
from comparison.rows import BIG, CPU, MEMORY, Row
from comparison.verdicts import Verdict, gigabytes_per_second, verdicts

_MARKERS = ("<!-- {name}: written by tools/compare.py -->", "<!-- end of {name} -->")
_CHARTS = "img"


def all_verdicts(results: Results) -> list[Verdict]:
    """Return all verdicts of all measured rows."""
    return [
        verdict
        for row in results.measured()
        for verdict in verdicts(
            row, results.rows[row.name], results.contenders, results.message_bytes
        )
    ]


def write(results: Results, page: Path) -> None:
    """Replace the generated sections of the page, and the charts."""
    charts = page.parent / _CHARTS
    charts.mkdir(exist_ok=True)
    shown = []
    for row in results.measured():
        values, unit = _chart_values(row, results)
        if values:
            name = f"performance-{row.name}.svg"
            (charts / name).write_text(bar_chart(row.title, unit, values, OURS))
            shown.append(f"![{row.title}]({_CHARTS}/{name})\n")
    text = page.read_text()
    for name, section in (
        ("conditions", _conditions(results.conditions)),
        ("ratios", _ratio_table(all_verdicts(results))),
        ("numbers", _number_table(results)),
        ("charts", "\n".join(shown)),
    ):
        text = with_section(text, name, section)
    page.write_text(text)


def with_section(text: str, name: str, section: str) -> str:
    """Return the text with the contents of a section replaced.

    Raises ValueError unless each marker occurs exactly once.
    """
    begin, end = (marker.format(name=name) for marker in _MARKERS)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"expected '{begin}' and '{end}', each once")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    return pattern.sub(lambda _: f"{begin}\n\n{section.strip()}\n\n{end}", text)


def _conditions(conditions: Mapping[str, str]) -> str:
    return _table(("", ""), ((name, text) for name, text in conditions.items()))


def _ratio_table(found: Iterable[Verdict]) -> str:
    return _table(
        ("measured", "against", "of", "wanted", "ratio", ""),
        (
            (
                one.row.title,
                one.against,
                one.measure,
                one.wanted,
                "not measured" if one.ratio is None else f"{one.ratio:.2f}x",
                {True: "met", False: "**not met**", None: ""}[one.is_met],
            )
            for one in found
        ),
    )


def _number_table(results: Results) -> str:
    return _table(
        ("measured", "server", "requests/s", "p50 ms", "p99 ms", "more", "repetitions"),
        (
            _number_cells(row, name, numbers, results.message_bytes)
            for row in results.measured()
            for name, numbers in results.rows[row.name].items()
        ),
    )


def _number_cells(row: Row, name: str, numbers: Numbers, message_bytes: int) -> tuple[str, ...]:
    if "error" in numbers:
        reason = " ".join(str(numbers["error"]).replace("|", "/").split())[:120]
        return (row.title, name, "", "", "", f"failed: {reason}", "")
    return (
        row.title,
        name,
        _number(numbers, "rps", "{:,.0f}"),
        _number(numbers, "p50", "{:.2f}"),
        _number(numbers, "p99", "{:.2f}"),
        _more(row, numbers, message_bytes),
        f"{numbers['clean']} clean of {len(numbers['repetitions'])}",
    )


def _more(row: Row, numbers: Numbers, message_bytes: int) -> str:
    speed = gigabytes_per_second(row, numbers, message_bytes)
    if speed is None:
        return _number(numbers, CPU, "{:.1f} us of processor time each")
    said = [f"{numbers['seconds'] * 1000:.0f} ms, {speed:.2f} GB/s one way"]
    if MEMORY in numbers:
        said.append(f"{numbers[MEMORY] / 1e6:.0f} MB above idle")
    return ", ".join(said)


def _number(numbers: Numbers, measure: str, form: str) -> str:
    return form.format(numbers[measure]) if measure in numbers else ""


def _chart_values(row: Row, results: Results) -> tuple[dict[str, float], str]:
    """Return a row's bars: requests per second, or GB/s for large messages."""
    found: dict[str, float] = {}
    for name, numbers in results.rows[row.name].items():
        value = (
            gigabytes_per_second(row, numbers, results.message_bytes)
            if row.name == BIG
            else numbers.get("rps")
        )
        if value:
            found[name] = value
    return found, "GB/s" if row.name == BIG else "requests/s"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head)]
    before = ""
    for first, *others in rows:
        # Leave the first cell empty if it repeats the line above.
        lines.append(("" if first == before else first, *others))
        before = first
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
