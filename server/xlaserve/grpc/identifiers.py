"""Reads the model id that ModelMesh puts into request headers."""

from collections.abc import Iterable
from types import MappingProxyType

from multidict import MultiMapping

from xlaserve.errors import InvalidRequest

MAX_ID_BYTES = 4096
"""Maximum length of a model id in a header."""
MAX_LOGGED_BYTES = 256
"""Length to which a virtual model id is truncated for logs."""

_ENCODINGS = MappingProxyType({"mm-model-id-bin": "UTF-8", "mm-model-id": "ASCII"})
"""Header with the model id -> encoding of the id."""
_VIRTUAL = ("mm-vmodel-id-bin", "mm-vmodel-id")
ID_HEADERS = (*_ENCODINGS, *_VIRTUAL)
"""The headers with the id of a model or a virtual model."""
_SHOWN_CHARACTERS = 64


def split_binary_lists(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Split comma-separated values of binary (`-bin`) headers into one header per value.

    A proxy may join repeated headers with commas (gRPC over HTTP/2, Custom-Metadata). grpclib
    does not split them: it decodes `YQ==,Yg==` as `a`, and `YWJj,ZGVm` as `abcdef`.
    """
    split: list[tuple[str, str]] = []
    for name, value in headers:
        if "," in value and name.endswith("-bin"):
            split += ((name, part.strip()) for part in value.split(","))
        else:
            split.append((name, value))
    return split


def model_id(metadata: MultiMapping[str | bytes]) -> str | None:
    """Return the model id from `mm-model-id-bin` or `mm-model-id`, or None if both are absent.

    `metadata` must be base64-decoded, after `split_binary_lists`. `mm-model-id-bin` is UTF-8 and
    `mm-model-id` ASCII; a comma in the latter is part of the id. Raises InvalidRequest, naming the
    header, if one is repeated, empty, too long or wrongly encoded, or if the two ids differ.
    """
    ids = {
        name: _read(name, encoding, *metadata.getall(name))
        for name, encoding in _ENCODINGS.items()
        if name in metadata
    }
    if len(set(ids.values())) > 1:
        listed = (f"{name} is {_shorten(value)}" for name, value in ids.items())
        raise InvalidRequest(f"the headers name two models: {', '.join(listed)}")
    return next(iter(ids.values()), None)


def vmodel_id(metadata: MultiMapping[str | bytes]) -> str | None:
    """Return the virtual model id, truncated for logging, or None if there is none.

    Never raises: invalid UTF-8 is replaced, the binary header takes precedence, and of repeated
    headers the first counts.
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
