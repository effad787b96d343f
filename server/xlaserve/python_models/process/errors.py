"""Serializes errors between the server and a model's process."""

from xlaserve import errors
from xlaserve.errors import XlaserveError
from xlaserve.errors import code as code_errors
from xlaserve.errors import language as language_errors
from xlaserve.errors import sequence as sequence_errors
from xlaserve.errors.code import ModelFailed
from xlaserve.errors.panics import text_of

_KNOWN = {**vars(errors), **vars(sequence_errors), **vars(code_errors), **vars(language_errors)}


def named(error: BaseException) -> tuple[str, str]:
    """Return the class name and text of an error."""
    kind = type(error)
    while kind.__name__ not in _KNOWN and kind is not BaseException:
        kind = kind.__base__ or BaseException
    return kind.__name__, text_of(error)


def raised(named_error: tuple[str, str]) -> XlaserveError:
    """Recreate an error from its class name and text, or a ModelFailed if the class is unknown."""
    name, text = named_error
    found = _KNOWN.get(name)
    kind: type[XlaserveError] = ModelFailed
    if isinstance(found, type) and issubclass(found, XlaserveError):
        kind = found
    # Skip `__init__`, which would format the text again.
    made = kind.__new__(kind)
    Exception.__init__(made, text)
    return made
