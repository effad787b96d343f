"""Chart of latency against throughput: one point per step, one curve per percentile."""

import math
from collections.abc import Sequence

from xlaserve.bench import svg
from xlaserve.bench.results import Result

_CURVES = ("p50", "p95", "p99")
_WIDTH, _HEIGHT = 720.0, 400.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 24.0, 56.0, 60.0
_TICKS = 5


def latency_chart(title: str, results: Sequence[Result]) -> str:
    """Return an SVG chart with answers per second on the x axis and milliseconds on the y axis.

    Steps without any answer are omitted.
    """
    shown = [one for one in results if one.latency_ms]
    x_ticks = ticks(max((one.answers_per_second for one in shown), default=1.0))
    y_ticks = ticks(max((one.latency_ms[_CURVES[-1]] for one in shown), default=1.0))

    def place(rate: float, milliseconds: float) -> tuple[float, float]:
        x = _LEFT + rate / x_ticks[-1] * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - milliseconds / y_ticks[-1] * (_HEIGHT - _TOP - _BOTTOM)
        return x, y

    shapes = [svg.text(_LEFT, 24, title, kind="title")]
    for value in x_ticks:
        x, y = place(value, 0)
        shapes += (svg.line(x, y, x, _TOP), svg.text(x, y + 18, f"{value:,g}", anchor="middle"))
    for value in y_ticks:
        x, y = place(0, value)
        shapes += (
            svg.line(x, y, _WIDTH - _RIGHT, y),
            svg.text(x - 8, y + 4, f"{value:g}", anchor="end"),
        )
    shapes += (
        svg.text(_WIDTH - _RIGHT, _HEIGHT - 14, "answers per second", anchor="end"),
        svg.text(_LEFT, 44, "milliseconds, by requests in flight"),
    )
    for at, (name, series) in enumerate(zip(_CURVES, svg.SERIES, strict=False)):
        points = [place(one.answers_per_second, one.latency_ms[name]) for one in shown]
        shapes.append(svg.curve(points, series))
        x = _WIDTH - _RIGHT - 150 + 55 * at
        shapes += (svg.bar(x, 15, 10, 10, series), svg.text(x + 14, 24, name))
    for one in shown:
        x, y = place(one.answers_per_second, one.latency_ms[_CURVES[-1]])
        shapes.append(svg.text(x - 8, y - 4, str(one.step.concurrency), anchor="end"))
    return svg.document(_WIDTH, _HEIGHT, title, shapes)


def ticks(largest: float) -> Sequence[float]:
    """Return axis ticks: a few round numbers from 0 up to at least the largest value."""
    rough = max(largest, 1e-9) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    return [step * index for index in range(math.ceil(largest / step) + 1)]
