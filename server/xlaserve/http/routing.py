"""The table of routes by method and path, and paths as clients wrote them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MappingProxyType
from typing import TypeAlias
from urllib.parse import unquote

from xlaserve.http.messages import BINARY_TYPE, JSON_TYPE, Handler, MakeCall, Prepare
from xlaserve.serving.call import Api, Operation

Words: TypeAlias = Sequence[tuple[int, str]]
"""Segments of a pattern that are no names, each with its place."""

MakeError: TypeAlias = Callable[[str, HTTPStatus, BaseException | None], object]
"""Makes the JSON of an error from its text, status and exception."""


def plain_error(text: str, status: HTTPStatus, error: BaseException | None) -> object:
    """Return the default body of an error."""
    return {"error": text}


def all_plain(target: str) -> MakeError:
    """Return that body's shape for every target."""
    return plain_error


@dataclass(frozen=True, slots=True)
class Header:
    """A header that goes with a body."""

    name: str
    kind: type
    text: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Body:
    """A body that a route takes or gives, for its description."""

    schema: object = None
    """A msgspec type for JSON; None for anything."""
    media_types: tuple[str, ...] = (JSON_TYPE,)
    required: bool = True
    headers: tuple[Header, ...] = ()
    example: object = None
    """An example of the JSON; None for none."""


_ABSOLUTE = re.compile("^https?://[^/?]*")
"""Start of a target in absolute form (RFC 9112, section 3.2.2)."""

BINARY_OR_JSON = (JSON_TYPE, BINARY_TYPE)


@dataclass(frozen=True, slots=True)
class QueryParameter:
    """A query parameter."""

    name: str
    kind: type
    text: str


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the route table; the OpenAPI description is made from the same rows."""

    method: str
    path: str
    """Segments between slashes; one in braces matches any text, percent-decoded."""
    operation: Operation
    """The operation that a permission names."""
    handle: Handler
    summary: str
    tag: str
    answer: Body = Body()
    takes: Body | None = None
    query: tuple[QueryParameter, ...] = ()
    errors: tuple[int, ...] = ()
    """Statuses of `{"error": text}` that the handler can answer with; 500 goes without saying."""
    other: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """Further statuses with `answer`, and their meaning."""
    api: Api | None = None
    """Its group of Triton, if that does not follow from the operation."""
    prepare: Prepare | None = None
    """Makes the fast-path equivalent of `handle`."""
    make_call: MakeCall | None = None
    """Makes the call of a request whose answer the core writes to it; None for an `HttpCall`."""
    error: object = None
    """The msgspec type of error bodies; None for `{"error": text}`."""
    name: str = field(init=False)
    """Method and path, for observers."""

    def __post_init__(self) -> None:
        # Once, and not for each request.
        object.__setattr__(self, "name", f"{self.method} {self.path}")


@dataclass(frozen=True, slots=True)
class Match:
    """The match of a path in the table: the route, or the methods that the path has."""

    route: Route | None
    names: Mapping[str, str]
    allowed: Sequence[str]


def path_of(target: str) -> str:
    """Return the path of a request target, as it was written."""
    return _ABSOLUTE.sub("", target).partition("?")[0]


class RouteTable:
    """Finds the route and the error format of a request."""

    def __init__(
        self,
        routes: Iterable[Route],
        errors: Mapping[str, MakeError] = MappingProxyType({}),
    ) -> None:
        """`errors` are formats by path prefix, without query; others are plain."""
        self.routes = tuple(routes)
        self._errors = errors
        self._by_length: dict[int, list[tuple[Words, tuple[str, ...], Route]]] = {}
        for route in self.routes:
            segments = tuple(route.path.split("/"))
            words = [(at, word) for at, word in enumerate(segments) if word[:1] != "{"]
            self._by_length.setdefault(len(segments), []).append((words, segments, route))

    def find(self, method: str, raw_path: str) -> Match:
        """Match a path as it stands in the request line: nothing is resolved or normalised.

        `//` and `..` are segments like any other, so that no path reaches what another names;
        `%2F` is part of a name. A slash at the end makes no difference.
        """
        segments = path_of(raw_path).split("/")
        if len(segments) > 2 and not segments[-1]:
            segments.pop()
        allowed: list[str] = []
        for words, pattern, route in self._by_length.get(len(segments), ()):
            for at, word in words:
                if segments[at] != word:
                    break
            else:
                names = _names(pattern, segments)
                if names is None:
                    continue
                if method == route.method or (method == "HEAD" and route.method == "GET"):
                    return Match(route, names, allowed)
                allowed.append(route.method)
        return Match(None, {}, allowed)

    def shape_of_errors(self, target: str) -> MakeError:
        """Return the error format of a target, with or without a route."""
        path = path_of(target)
        for start, shape in self._errors.items():
            if path.startswith(start):
                return shape
        return plain_error


def _names(pattern: Sequence[str], segments: Sequence[str]) -> dict[str, str] | None:
    """Return the names in a path whose words are those of a pattern; None where one is empty."""
    names: dict[str, str] = {}
    for want, have in zip(pattern, segments, strict=True):
        if want[:1] == "{":
            if not have:
                return None
            names[want[1:-1]] = unquote(have, errors="surrogateescape")
    return names
