"""Sizes as people read them."""

_UNITS = ("B", "kB", "MB", "GB", "TB")
_STEP = 1000


def format_bytes(count: int) -> str:
    """Write a number of bytes with three digits and a decimal unit."""
    value, unit = float(count), 0
    while value >= _STEP and unit < len(_UNITS) - 1:
        value, unit = value / _STEP, unit + 1
    return f"{value:.3g} {_UNITS[unit]}" if unit else f"{count} B"
