"""The route table, by method and path."""

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
"""The literal segments of a pattern, each with its index."""

MakeError: TypeAlias = Callable[[str, HTTPStatus, BaseException | None], object]
"""Creates the JSON value of an error from its text, status and exception."""


def plain_error(text: str, status: HTTPStatus, error: BaseException | None) -> object:
    """Return the default error body."""
    return {"error": text}


def all_plain(target: str) -> MakeError:
    """Return the default error format for every target."""
    return plain_error


@dataclass(frozen=True, slots=True)
class Header:
    """A header that belongs to a body, for the API description."""

    name: str
    kind: type
    text: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Body:
    """A request or response body of a route, for the API description."""

    schema: object = None
    """A msgspec type for JSON; None for any content."""
    media_types: tuple[str, ...] = (JSON_TYPE,)
    required: bool = True
    headers: tuple[Header, ...] = ()
    example: object = None
    """An example of the JSON value, or None."""


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
    """Slash-separated segments; a segment in braces matches any text, percent-decoded."""
    operation: Operation
    """The operation that permissions refer to."""
    handle: Handler
    summary: str
    tag: str
    answer: Body = Body()
    takes: Body | None = None
    query: tuple[QueryParameter, ...] = ()
    errors: tuple[int, ...] = ()
    """Statuses that the handler can answer with `{"error": text}`, besides 500."""
    other: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """Further statuses that have `answer` as their body, with their meaning."""
    api: Api | None = None
    """The Triton API group, if it does not follow from the operation."""
    prepare: Prepare | None = None
    """Creates the fast-path equivalent of `handle`."""
    make_call: MakeCall | None = None
    """Creates a call that the core writes its response to; None for an `HttpCall`."""
    error: object = None
    """The msgspec type of error bodies; None for `{"error": text}`."""
    name: str = field(init=False)
    """Method and path, for observers."""

    def __post_init__(self) -> None:
        # Computed once instead of for each request.
        object.__setattr__(self, "name", f"{self.method} {self.path}")


@dataclass(frozen=True, slots=True)
class Match:
    """The route that matches a path, or None, with the methods that the path supports."""

    route: Route | None
    names: Mapping[str, str]
    allowed: Sequence[str]


def path_of(target: str) -> str:
    """Return the path of a request target, undecoded."""
    return _ABSOLUTE.sub("", target).partition("?")[0]


class RouteTable:
    """Finds the route and the error format of a request."""

    def __init__(
        self,
        routes: Iterable[Route],
        errors: Mapping[str, MakeError] = MappingProxyType({}),
    ) -> None:
        """`errors` maps path prefixes to error formats; other paths use the default."""
        self.routes = tuple(routes)
        self._errors = errors
        self._by_length: dict[int, list[tuple[Words, tuple[str, ...], Route]]] = {}
        for route in self.routes:
            segments = tuple(route.path.split("/"))
            words = [(at, word) for at, word in enumerate(segments) if word[:1] != "{"]
            self._by_length.setdefault(len(segments), []).append((words, segments, route))

    def find(self, method: str, raw_path: str) -> Match:
        """Match an undecoded path; it is not normalized.

        `//` and `..` are ordinary segments, so that no path is an alias of another; `%2F` is part
        of a name. A trailing slash is ignored.
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
        """Return the error format for a target, which need not have a route."""
        path = path_of(target)
        for start, shape in self._errors.items():
            if path.startswith(start):
                return shape
        return plain_error


def _names(pattern: Sequence[str], segments: Sequence[str]) -> dict[str, str] | None:
    """Return the path parameters of a path that matches a pattern; None if one is empty."""
    names: dict[str, str] = {}
    for want, have in zip(pattern, segments, strict=True):
        if want[:1] == "{":
            if not have:
                return None
            names[want[1:-1]] = unquote(have, errors="surrogateescape")
    return names
