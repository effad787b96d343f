"""SVG shapes for charts, with colours for light and dark mode."""

from collections.abc import Iterable, Sequence
from html import escape

_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
SERIES = ("a", "b", "c", "d", "e", "f")
"""CSS classes of the series' colours, in the order of their use."""

_LIGHT = ("#0b62a4", "#c2410c", "#15803d", "#7e22ce", "#57606a", "#a16207")
_DARK = ("#58a6ff", "#fb923c", "#4ade80", "#c084fc", "#9aa4af", "#facc15")


def document(width: float, height: float, title: str, shapes: Iterable[str]) -> str:
    """Return a complete SVG file; `title` is for screen readers."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_style()}</style>",
            f'<rect class="paper" width="{width:g}" height="{height:g}"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "label") -> str:
    """Return a text element; `anchor` is the SVG text anchor: start, middle or end."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a thin line of the grid."""
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def curve(points: Sequence[tuple[float, float]], series: str) -> str:
    """Return a polyline through points, with a dot at each point."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle class="{series} dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points
    )
    return f'<polyline class="{series} curve" points="{path}"/>{dots}'


def bar(x: float, y: float, width: float, height: float, series: str) -> str:
    """Return a filled rectangle."""
    return (
        f'<rect class="{series} bar" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="2"/>'
    )


def _style() -> str:
    return (
        f"text{{font-family:{_FONT};font-size:12px}}.title{{font-size:14px;font-weight:600}}"
        f".curve{{fill:none;stroke-width:2}}"
        f"{_colours('#ffffff', '#1f2328', '#d0d7de', _LIGHT)}"
        "@media (prefers-color-scheme: dark){"
        f"{_colours('#0d1117', '#e6edf3', '#30363d', _DARK)}}}"
    )


def _colours(paper: str, ink: str, grid: str, series: Sequence[str]) -> str:
    rules = [f".paper{{fill:{paper}}}text{{fill:{ink}}}.grid{{stroke:{grid}}}"]
    for name, colour in zip(SERIES, series, strict=True):
        rules.append(f".{name}.bar,.{name}.dot{{fill:{colour}}}.{name}.curve{{stroke:{colour}}}")
    return "".join(rules)
