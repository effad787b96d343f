"""Sizes in readable form, with the units of the status page."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_MOST = 999.5
"""Threshold for the next unit: larger numbers would round to four digits."""


def format_bytes(count: int) -> str:
    """Format a number of bytes with three significant digits and a binary unit."""
    value, unit = float(count), 0
    while value >= _MOST and unit < len(_UNITS) - 1:
        value, unit = value / _STEP, unit + 1
    return f"{value:.3g} {_UNITS[unit]}" if unit else f"{count} B"
