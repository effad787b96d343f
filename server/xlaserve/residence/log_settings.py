"""Log settings that clients may change at run time (logging extension)."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import structlog

from xlaserve.concurrency.control_plane import Change, ChangeKind, ControlPlane
from xlaserve.errors import InvalidParameter, Unsupported
from xlaserve.process import log
from xlaserve.serving.access.sight import require_all_seen

Value: TypeAlias = bool | int | str

FORMAT = "ISO8601"
"""The only supported format of timestamps."""
_DEFAULT_FORMAT = "default"
"""Triton's name for the default format."""

_FIXED = frozenset(("log_file", "log_format"))
"""Read-only settings: a request may only repeat their current value."""
_LARGEST = 2**32 - 1
_SHOWN_CHARACTERS = 80


def log_settings() -> dict[str, Value]:
    """Return the log settings under Triton's names."""
    levels = log.levels()
    return {
        "log_file": "",
        "log_info": levels.info,
        "log_warning": levels.warning,
        "log_error": levels.error,
        "log_verbose_level": levels.verbose_level,
        "log_format": FORMAT,
    }


async def change_log_settings(plane: ControlPlane, change: Mapping[str, Value]) -> None:
    """Apply `update_log_settings` in every process of the server."""

    async def here() -> None:
        update_log_settings(change)

    await plane.apply(Change(ChangeKind.LOG, arguments=change), here)


async def make_log_change(change: Change) -> None:
    """Apply a log change forwarded by another process of the server."""
    update_log_settings(change.arguments)


def update_log_settings(change: Mapping[str, Value]) -> None:
    """Change log settings, either all of them or none.

    Raises InvalidParameter, or Unsupported for `log_file`, which clients may not choose.
    """
    require_all_seen()
    for name, value in change.items():
        if name == "log_file" and value:
            raise Unsupported("changing log_file by a request")
        row = _ROWS.get(name)
        if row is None:
            expected = f"one of {', '.join(_ROWS)}"
            raise InvalidParameter(name[:_SHOWN_CHARACTERS], expected, "another name")
        expected, fits = row
        if not fits(value):
            raise InvalidParameter(name, expected, repr(value)[:_SHOWN_CHARACTERS])
    # Log before the change: if a client turns warnings off, this is the last record.
    structlog.get_logger("log").warning("log settings changed", **change)
    changed: dict[str, Any] = {
        name.removeprefix("log_"): value for name, value in change.items() if name not in _FIXED
    }
    log.set_levels(replace(log.levels(), **changed))


def _is_boolean(value: Value) -> bool:
    return type(value) is bool


_ROWS: Mapping[str, tuple[str, Callable[[Value], bool]]] = {
    "log_info": ("true or false", _is_boolean),
    "log_warning": ("true or false", _is_boolean),
    "log_error": ("true or false", _is_boolean),
    "log_verbose_level": (
        f"an integer of 0 to {_LARGEST}",
        lambda value: type(value) is int and 0 <= value <= _LARGEST,
    ),
    "log_format": (
        f"{FORMAT} or {_DEFAULT_FORMAT} (the same time format)",
        lambda value: value in (FORMAT, _DEFAULT_FORMAT),
    ),
    "log_file": ("an empty string", lambda value: value == ""),
}
