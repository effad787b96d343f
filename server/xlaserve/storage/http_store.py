"""Objects on an HTTP server that lists its directories as HTML pages."""

import http.client
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from html.parser import HTMLParser
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from xlaserve.errors.panics import answering
from xlaserve.storage.attempts import Attempts
from xlaserve.storage.objects import (
    ObjectChanged,
    ObjectMissing,
    RangeIgnored,
    RemoteObject,
    StoreProblem,
    ended_early,
)

T = TypeVar("T")

_PIECE_BYTES = 1 << 20
_MAX_PAGE_BYTES = 16 << 20
_MAX_REDIRECTS = 5
_MAX_DEPTH = 16
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_ABSENT = frozenset({404, 410})
_DENIED = frozenset({401, 403, 407})
_SERVER_ERROR = 500
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class HttpStore:
    """Reads objects below a URL. Blocks; uses no proxy, cookies or credentials."""

    def __init__(
        self,
        url: str,
        *,
        seconds: float,
        max_objects: int,
        threads: int = 1,
        attempts: Attempts | None = None,
    ) -> None:
        """`threads` is the number of concurrent requests of a listing."""
        self._threads = threads
        self._asking = threading.BoundedSemaphore(threads)
        """Limits the concurrent requests of all listings."""
        self._attempts = attempts or Attempts.one()
        self._url = url.rstrip("/") + "/"
        self._seconds = seconds
        self._max_objects = max_objects

    def objects(self, below: str = "") -> list[RemoteObject]:
        """Return all objects below a prefix, by reading directory pages and a HEAD per object."""
        try:
            return self._list(below)
        except StoreProblem as problem:
            self.failed(problem)
            raise

    def _list(self, below: str) -> list[RemoteObject]:
        found: list[RemoteObject] = []
        seen = 0
        pool = ThreadPoolExecutor(self._threads, "listing")

        def begin(ask: Callable[[str], T], name: str) -> Future[T]:
            return pool.submit(answering(partial(self._listed, ask, name)))

        try:
            first = f"{below.strip('/')}/".removeprefix("/")
            pages = {begin(self._page, first): (first, 0)}
            heads: set[Future[RemoteObject]] = set()
            while pages or heads:
                pending: set[Future[Any]] = {*pages, *heads}
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                found += [head.result() for head in done & heads]
                heads -= done
                for page in done & pages.keys():
                    directory, depth = pages.pop(page)
                    names = page.result()
                    seen += len(names)
                    if seen > self._max_objects:
                        raise StoreProblem(
                            f"it has more objects than remote_max_objects ({self._max_objects})",
                            is_transient=False,
                        )
                    for name in names:
                        if not name.endswith("/"):
                            heads.add(begin(self._head, directory + name))
                        elif depth < _MAX_DEPTH:
                            inner = directory + name
                            pages[begin(self._page, inner)] = inner, depth + 1
        finally:
            pool.shutdown(cancel_futures=True)
        return sorted(found, key=lambda one: one.name)

    def read(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """Yield a range of an object's bytes as they arrive."""
        with self._attempts.noting():
            yield from self._read(found, start, stop)

    def _read(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        headers = {"Range": f"bytes={start}-{stop - 1}"} if start or stop < found.size_bytes else {}
        with _Answer.of(self._at(found.name), self._seconds, "GET", headers) as answer:
            is_part = answer.status == http.client.PARTIAL_CONTENT
            if answer.status != http.client.OK and not is_part:
                raise answer.refused(found.name)
            if answer.mark != found.mark:
                raise ObjectChanged(found.name)
            if start and not is_part:
                raise RangeIgnored
            answer.check_length(found, (start, stop) if is_part else (0, found.size_bytes))
            missing = stop - start
            for piece in answer.pieces():
                yield piece[:missing]
                missing -= len(piece)
                if missing <= 0:
                    break
            if missing > 0:
                raise ended_early(found, stop - missing)
            if missing < 0 and stop == found.size_bytes:
                raise _too_long(found)
            if not missing and stop == found.size_bytes and next(answer.pieces(), b""):
                raise _too_long(found)

    def confirm(self, found: RemoteObject) -> None:
        """Check that an object is unchanged since it was listed; raises ObjectChanged."""
        now = self._stored(found.name)
        if (now.mark, now.size_bytes) != (found.mark, found.size_bytes):
            raise ObjectChanged(found.name)

    def failed(self, problem: StoreProblem) -> None:
        """Record why a load or a listing failed."""
        self._attempts.failed(problem)

    def find(self, name: str) -> RemoteObject | None:
        """Return an object, or None if it is missing; raises StoreProblem."""
        try:
            return self._stored(name)
        except ObjectMissing:
            return None

    def _at(self, name: str) -> str:
        return self._url + quote(name)

    def look(self) -> None:
        """Request the root page once, to test the store."""
        self._attempts.look(partial(self._page, ""))

    def _listed(self, ask: Callable[[str], T], name: str) -> T:
        """Make a request of a listing, with retries and limited concurrency."""
        with self._asking:
            return self._attempts.run(partial(ask, name))

    def _stored(self, name: str) -> RemoteObject:
        return self._attempts.run(partial(self._head, name))

    def _page(self, directory: str) -> list[str]:
        url = self._at(directory)
        with _Answer.of(url, self._seconds, "GET", {}) as answer:
            if answer.status != http.client.OK:
                raise answer.refused(directory)
            page = bytearray()
            for piece in answer.pieces():
                page += piece
                if len(page) > _MAX_PAGE_BYTES:
                    raise StoreProblem(
                        f"the listing of '{directory}' has more than {_MAX_PAGE_BYTES} bytes",
                        is_transient=False,
                    )
            # http.client ends a body that is cut as one that is whole: models would be missing.
            if answer.length is not None and len(page) < answer.length:
                raise StoreProblem(
                    f"the listing of '{directory}' ended at byte {len(page)} of {answer.length}"
                )
        links = _Links()
        links.feed(page.decode(errors="replace"))
        return sorted({name for link in links.found if (name := _name_below(url, link))})

    def _head(self, name: str) -> RemoteObject:
        with _Answer.of(self._at(name), self._seconds, "HEAD", {}) as answer:
            if answer.status != http.client.OK:
                raise answer.refused(name)
            if answer.length is None:
                raise StoreProblem(f"the server sent no length for '{name}'", is_transient=False)
            return RemoteObject(name, answer.length, answer.mark)


def _too_long(found: RemoteObject) -> StoreProblem:
    return StoreProblem(
        f"'{found.name}' has more than the {found.size_bytes} bytes of the listing",
        is_transient=False,
    )


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the targets of links."""
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _name_below(page: str, link: str) -> str:
    """Return the directory entry that a link refers to, or an empty string for other links."""
    with suppress(ValueError):
        target = urlsplit(urljoin(page, link))
        base = urlsplit(page)
        same = (target.scheme, target.netloc) == (base.scheme, base.netloc)
        if same and not target.query and target.path.startswith(base.path):
            rest = target.path[len(base.path) :]
            if rest.strip("/") and "/" not in rest.removesuffix("/"):
                # The name may contain any character, even a slash; `check_names` validates it.
                return unquote(rest)
    return ""


class _Answer:
    """The response to one request, on its own connection."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        seconds: float,
    ) -> None:
        self._connection = connection
        self._response = response
        self._seconds = seconds
        self.status = response.status

    @classmethod
    def of(cls, url: str, seconds: float, method: str, headers: dict[str, str]) -> "_Answer":
        """Send a request, and follow redirects within the same scheme; raises StoreProblem."""
        scheme = urlsplit(url).scheme
        for _ in range(_MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            if parts.scheme != scheme or not parts.hostname:
                raise StoreProblem(
                    f"it redirects from {scheme} to {parts.scheme[:20]}", is_transient=False
                )
            answer = cls._ask(parts, seconds, method, headers)
            if answer.status not in _REDIRECTS:
                answer._check_encoding()
                return answer
            answer.close()
            url = urljoin(url, answer._response.headers.get("Location", ""))
        raise StoreProblem(f"it redirects more than {_MAX_REDIRECTS} times", is_transient=False)

    @classmethod
    def _ask(
        cls, parts: SplitResult, seconds: float, method: str, headers: dict[str, str]
    ) -> "_Answer":
        host = parts.hostname or ""
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                host, parts.port, timeout=seconds, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=seconds)
        try:
            path = parts.path or "/"
            target = f"{path}?{parts.query}" if parts.query else path
            plain = {"Accept-Encoding": "identity", "Connection": "close", **headers}
            connection.request(method, target, headers=plain)
            return cls(connection, connection.getresponse(), seconds)
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            raise _problem(error, seconds) from None

    def __enter__(self) -> "_Answer":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, even if the response is incomplete."""
        self._response.close()
        self._connection.close()

    @property
    def length(self) -> int | None:
        """Return the Content-Length, or None."""
        text = self._response.headers.get("Content-Length", "")
        return int(text) if text.isascii() and text.isdigit() else None

    @property
    def mark(self) -> str:
        """Return a mark that changes with the object: its ETag, or its modification time."""
        headers = self._response.headers
        return headers.get("ETag") or headers.get("Last-Modified") or ""

    def refused(self, name: str) -> StoreProblem:
        """Return the problem that the status indicates."""
        status = self.status
        if status in _ABSENT:
            return ObjectMissing(f"the server answered {status} for '{name}'")
        hint = ": it has to let this server read" if status in _DENIED else ""
        return StoreProblem(
            f"the server answered {status} for '{name}'{hint}",
            is_transient=status in _TRANSIENT,
            is_away=status in _TRANSIENT | _DENIED or status >= _SERVER_ERROR,
        )

    def check_length(self, found: RemoteObject, bounds: tuple[int, int]) -> None:
        """Check that the response contains the requested range; raises StoreProblem."""
        start, stop = bounds
        text = self._response.headers.get("Content-Range")
        if self.status == http.client.PARTIAL_CONTENT:
            got = _RANGE.fullmatch(text or "")
            if got is None or tuple(map(int, got.groups())) != (start, stop - 1, found.size_bytes):
                raise StoreProblem(
                    f"asked for bytes {start} to {stop - 1} of '{found.name}', got '{text}'",
                    is_transient=False,
                )
        if self.length is not None and self.length != stop - start:
            raise StoreProblem(
                f"'{found.name}' has {self.length} bytes, expected {stop - start}",
                is_transient=False,
            )

    def pieces(self) -> Iterator[bytes]:
        """Yield received data in pieces; the timeout applies to each piece."""
        while True:
            try:
                # read1() rather than read(), which a slowly dripping server could block forever.
                piece = self._response.read1(_PIECE_BYTES)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise _problem(error, self._seconds) from None
            if not piece:
                return
            yield piece

    def _check_encoding(self) -> None:
        coding = self._response.headers.get("Content-Encoding", "identity")
        if coding.lower() not in ("", "identity"):
            self.close()
            raise StoreProblem(
                f"the server sends Content-Encoding '{coding[:40]}', expected identity",
                is_transient=False,
            )


def _problem(error: Exception, seconds: float) -> StoreProblem:
    if isinstance(error, TimeoutError):
        return StoreProblem(f"no answer within {seconds:g} seconds (remote_stall_seconds)")
    if isinstance(error, ssl.SSLCertVerificationError):
        return StoreProblem("its certificate is not trusted", is_transient=False, is_away=True)
    if isinstance(error, ConnectionRefusedError):
        return StoreProblem("the connection was refused")
    if isinstance(error, socket.gaierror):
        return StoreProblem("its host name could not be resolved")
    return StoreProblem(f"the connection failed with {type(error).__name__}")
