"""Validation of names that become part of a path."""

import unicodedata
from collections.abc import Callable
from urllib.parse import unquote

from xlaserve.errors import InvalidName, InvalidVersion

MAX_NAME_BYTES = 255
"""Maximum length of a file name in Linux."""

_LEAVES = frozenset({".", ".."})


def check_name(kind: str, name: str) -> str:
    """Return the name if it is safe to join to a directory; raises InvalidName otherwise.

    Names such as `...` and `a..1` are allowed. Escaped and look-alike forms of a separator or of
    `..` are rejected too, since a proxy or a client could decode them.
    """
    problem = next(filter(None, map(_problem, _forms(name))), None)
    if problem is not None:
        raise InvalidName(kind, name, problem)
    return name


def _forms(name: str) -> list[str]:
    unescaped = unquote(name)
    return [name, unescaped, unquote(unescaped), unicodedata.normalize("NFKC", name)]


def _problem(name: str) -> str | None:
    return next((problem for holds, problem in _PROBLEMS if holds(name)), None)


def _is_undecoded(name: str) -> bool:
    """Tell whether a name contains invalid UTF-8, which Python represents by surrogates."""
    return any("\udc80" <= character <= "\udcff" for character in name)


def _has_control_character(name: str) -> bool:
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in name)


_PROBLEMS: tuple[tuple[Callable[[str], bool], str], ...] = (
    (lambda name: not name.strip(), "it is empty"),
    (lambda name: name != name.strip(), "it starts or ends with white space"),
    (lambda name: name in _LEAVES, "it points outside its directory"),
    (lambda name: "/" in name or "\\" in name, "it contains a path separator"),
    (_is_undecoded, "it is not UTF-8, rename it"),
    (_has_control_character, "it contains a control character"),
    (
        lambda name: len(name.encode(errors="replace")) > MAX_NAME_BYTES,
        f"it is longer than {MAX_NAME_BYTES} bytes",
    ),
)


def check_version(text: str) -> int:
    """Return the number of a version directory, or raise InvalidName."""
    if not text.isascii() or not text.isdigit() or text != str(int(text[:20])) or text == "0":
        raise InvalidName("version", text, "expected a positive number without leading zeros")
    return int(text)


def check_version_text(model: str, text: str) -> None:
    """Raise InvalidVersion unless a requested version is a number, or empty for the newest."""
    if text and not (text.isascii() and text.isdigit()):
        raise InvalidVersion(model, text)


def is_version(text: str) -> bool:
    """Tell whether a directory with this name is a version."""
    try:
        check_version(text)
    except InvalidName:
        return False
    return True
