"""Bar charts of a comparison: one for each row, one bar for each server."""

from collections.abc import Mapping

from xlaserve.bench import svg

_WIDTH = 760.0
_LEFT, _RIGHT, _TOP = 150.0, 130.0, 48.0
_BAR, _GAP = 20.0, 10.0
_MARGIN = 14.0
_OURS, _OTHERS = svg.SERIES[0], svg.SERIES[4]


def bar_chart(title: str, unit: str, values: Mapping[str, float], ours: str) -> str:
    """Return an SVG file; bars whose name begins with `ours` are highlighted."""
    largest = max(values.values())
    shapes = [svg.text(_MARGIN, 24, title, kind="title")]
    y = _TOP
    for name, value in values.items():
        width = max(1.0, value / largest * (_WIDTH - _LEFT - _RIGHT))
        series = _OURS if name.startswith(ours) else _OTHERS
        shapes += (
            svg.text(_LEFT - 10, y + 15, name, anchor="end"),
            svg.bar(_LEFT, y, width, _BAR, series),
            svg.text(
                _LEFT + width + 8,
                y + 15,
                f"{value:,.3g} {unit}" if value < 100 else f"{value:,.0f} {unit}",
            ),
        )
        y += _BAR + _GAP
    return svg.document(_WIDTH, y + _MARGIN - _GAP, title, shapes)
