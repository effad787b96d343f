"""The model id that a mesh puts into request headers."""

from collections.abc import Iterable
from types import MappingProxyType

from multidict import MultiMapping

from xlaserve.errors import InvalidRequest

MAX_ID_BYTES = 4096
"""Longest id in a header."""
MAX_LOGGED_BYTES = 256
"""Length of logged ids."""

_ENCODINGS = MappingProxyType({"mm-model-id-bin": "UTF-8", "mm-model-id": "ASCII"})
"""The headers that hold the id of a model."""
_VIRTUAL = ("mm-vmodel-id-bin", "mm-vmodel-id")
ID_HEADERS = (*_ENCODINGS, *_VIRTUAL)
"""All headers with ids."""
_SHOWN_CHARACTERS = 64


def split_binary_lists(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers, with one for each value of those in base64 that hold several.

    A proxy may join headers of one name with commas (gRPC over HTTP/2, Custom-Metadata). grpclib
    does not take them apart: it decodes `YQ==,Yg==` as `a`, and `YWJj,ZGVm` as `abcdef`.
    """
    split: list[tuple[str, str]] = []
    for name, value in headers:
        if "," in value and name.endswith("-bin"):
            split += ((name, part.strip()) for part in value.split(","))
        else:
            split.append((name, value))
    return split


def model_id(metadata: MultiMapping[str | bytes]) -> str | None:
    """Return the id that `mm-model-id-bin` or `mm-model-id` holds, or None where neither is there.

    The first holds UTF-8, without its base64 here, the second ASCII. Raises InvalidRequest, with
    the name of the header, where one is repeated, empty, too long or of another encoding, and
    where the two differ. A comma in the second is part of the id; lists in the first are to be
    split before they are decoded.
    """
    ids = {
        name: _read(name, encoding, *metadata.getall(name))
        for name, encoding in _ENCODINGS.items()
        if name in metadata
    }
    if len(set(ids.values())) > 1:
        said = (f"{name} is {_shorten(value)}" for name, value in ids.items())
        raise InvalidRequest(f"the headers name two models: {', '.join(said)}")
    return next(iter(ids.values()), None)


def vmodel_id(metadata: MultiMapping[str | bytes]) -> str | None:
    """Return the id of a virtual model, cut short, or None where there is none.

    It is for logs only: nothing is an error, what is not UTF-8 is replaced, and of several the
    first of the binary ones counts.
    """
    for name in _VIRTUAL:
        value = metadata.get(name)
        if value:
            return _octets(value)[:MAX_LOGGED_BYTES].decode(errors="replace")
    return None


def _read(name: str, encoding: str, value: str | bytes, *more: str | bytes) -> str:
    if more:
        raise InvalidRequest(f"the header {name} is repeated, expected one id")
    octets = _octets(value)
    if not octets:
        raise InvalidRequest(f"the header {name} is empty, expected an id")
    if len(octets) > MAX_ID_BYTES:
        got = f"got {len(octets)}"
        raise InvalidRequest(f"the header {name}: expected at most {MAX_ID_BYTES} bytes, {got}")
    try:
        return octets.decode(encoding)
    except UnicodeDecodeError as error:
        got = f"got another byte at {error.start}"
        raise InvalidRequest(f"the header {name}: expected {encoding}, {got}") from error


def _octets(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode(errors="surrogatepass")


def _shorten(value: str) -> str:
    return repr(value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "...")
