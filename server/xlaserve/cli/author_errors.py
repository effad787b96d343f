"""Errors in an author's code, reported in one line that names the source line."""

import linecache
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xlaserve
from xlaserve.errors import InvalidModel, XlaserveError, causes

_MAX_CHARACTERS = 400
"""Maximum length of an exception's text; some JAX errors are very long."""

_NOT_THE_AUTHORS = (
    Path(xlaserve.__file__).parent,
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_ADVICE = {
    "'_DimExpr' object cannot be interpreted as an integer": (
        "; the number of rows is unknown at export: replace a loop over rows by jax.vmap"
    ),
}
"""Advice that is appended to an error of JAX, by a part of the error's text."""


@contextmanager
def reported_in_one_line(target: str, *, with_traceback: bool) -> Iterator[None]:
    """Turn any exception of a block into InvalidModel; optionally print its traceback.

    FileExistsError is raised unchanged, since it concerns the output.
    """
    try:
        yield
    except FileExistsError:
        raise
    except Exception as error:
        if with_traceback:
            traceback.print_exception(error)
        raise InvalidModel(error_line(target, error)) from error


def error_line(target: str, error: Exception) -> str:
    """Return the line of the author's code that raised an exception, and its text."""
    text = " ".join(str(error).split())
    if len(text) > _MAX_CHARACTERS:
        text = text[:_MAX_CHARACTERS] + "..."
    if not isinstance(error, XlaserveError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    where = _line(error)
    text += next((advice for sign, advice in _ADVICE.items() if sign in text), "")
    if where:
        return f"{where}: {text}"
    return text if isinstance(error, XlaserveError) else f"{target}: {text}"


def _line(error: BaseException) -> str:
    """Return the innermost line of the author's code in an exception or one of its causes."""
    for one in causes(error):
        if isinstance(one, SyntaxError) and one.filename and one.lineno:
            return f"{one.filename}:{one.lineno}"
        for frame in reversed(traceback.extract_tb(one.__traceback__)):
            if _is_the_authors(frame.filename):
                source = linecache.getline(frame.filename, frame.lineno or 0).strip()
                shown = f" `{source}`" if source else ""
                return f"{frame.filename}:{frame.lineno}, in {frame.name}:{shown}"
    return ""


def _is_the_authors(filename: str) -> bool:
    path = Path(filename)
    return not filename.startswith("<") and not any(map(path.is_relative_to, _NOT_THE_AUTHORS))
