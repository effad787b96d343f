"""An HTTP object server on the loopback that can truncate, lie, and stall on request."""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

Fault = Callable[["Handler", bytes], bool]
"""Handles a GET of an object; returns False to let the server handle it."""


@dataclass
class Shelves:
    """The objects of a server, and the faults that it simulates."""

    objects: dict[str, bytes] = field(default_factory=dict)
    """Content by path, without leading slash."""
    fault: Fault | None = None
    is_away: bool = False
    """Whether the server answers every request for an object with 503."""
    pages: dict[str, bytes] = field(default_factory=dict)
    """Directory pages that are not generated from the objects."""
    may_list: threading.Event = field(default_factory=threading.Event)
    """Handlers wait for it before they send a directory page; set unless a test clears it."""
    pages_left: threading.Semaphore | None = None
    """Number of directory pages that may still be sent; None means unlimited."""
    failing: dict[tuple[str, str], int] = field(default_factory=dict)
    """Number of further requests that fail, by method and path."""
    failure: "Callable[[Handler], object]" = lambda handler: handler.head("", 0, 503)
    """Answers the requests that fail."""
    turns: threading.Semaphore | None = None
    """Each HEAD acquires it, so that a test can release them one by one."""
    heads_at_once: list[int] = field(default_factory=lambda: [0, 0])
    """HEAD requests in progress, and their maximum."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range header of every request."""
    released: threading.Event = field(default_factory=threading.Event)
    """Set at the end to release stalled handlers."""

    def __post_init__(self) -> None:
        """Allow directory pages."""
        self.may_list.set()

    def gets(self) -> list[str]:
        """Return the paths of all GET requests for objects."""
        return [path for method, path, _ in self.asked if method == "GET" and path in self.objects]

    def etag(self, path: str) -> str:
        """Return the ETag, a hash of the content."""
        return f'"{hashlib.sha256(self.objects[path]).hexdigest()[:16]}"'


class Handler(BaseHTTPRequestHandler):
    """Serves objects with ranges and ETags, and directories as HTML pages of links."""

    protocol_version = "HTTP/1.1"
    shelves: Shelves

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""

    def do_HEAD(self) -> None:
        """Send the size and the ETag of an object."""
        shelves = self.shelves
        with shelves.lock:
            shelves.heads_at_once[0] += 1
            shelves.heads_at_once[1] = max(shelves.heads_at_once)
        if shelves.turns is not None:
            shelves.turns.acquire()
        with shelves.lock:
            shelves.heads_at_once[0] -= 1
        path = self._asked()
        if path is not None:
            self.head(path, len(self.shelves.objects[path]))

    def do_GET(self) -> None:
        """Send an object or a directory page."""
        path = self._asked()
        if path is None:
            return
        content = self.shelves.objects[path]
        if self.shelves.fault is not None and self.shelves.fault(self, content):
            self.close_connection = True
            return
        start, stop = self.part(len(content))
        status = 206 if self.headers.get("Range") else 200
        more = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        if status == 206:
            self.head(path, stop - start, status, **more)
        else:
            self.head(path, stop - start)
        self.wfile.write(content[start:stop])

    def part(self, size: int) -> tuple[int, int]:
        """Return the requested byte range of an object."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else (0, size)

    def head(self, path: str, length: int | None, status: int = 200, **more: str) -> None:
        """Send the status and headers; a length of None omits Content-Length."""
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if path in self.shelves.objects:
            self.send_header("ETag", self.shelves.etag(path))
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()

    def content(self, path: str) -> bytes:
        """Return an object or a directory page; empty if there is neither."""
        if path in self.shelves.objects:
            return self.shelves.objects[path]
        below = {name.removeprefix(path) for name in self.shelves.objects if name.startswith(path)}
        entries = {re.sub(r"/.*", "/", name) for name in below}
        made = "".join(f'<a href="{quote(entry)}">x</a>' for entry in sorted(entries))
        return self.shelves.pages.get(path, made.encode())

    @property
    def name(self) -> str:
        """Return the requested path."""
        return unquote(self.path).removeprefix("/")

    def _asked(self) -> str | None:
        path = self.name
        self.shelves.asked.append((self.command, path, self.headers.get("Range", "")))
        left = self.shelves.failing.get((self.command, path), 0)
        is_away = self.shelves.is_away and path in self.shelves.objects
        if is_away or left:
            self.shelves.failing[self.command, path] = max(0, left - 1)
            self.shelves.failure(self)
        elif path in self.shelves.objects:
            return path
        else:
            self._page(path)
        return None

    def _page(self, path: str) -> None:
        self.shelves.may_list.wait()
        if (left := self.shelves.pages_left) is not None:
            left.acquire()
        if self.shelves.is_away:
            self.head(path, 0, 503)
            return
        page = self.content(path)
        self.head("", len(page), 200 if page else 404)
        if self.command == "GET":
            self.wfile.write(page)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


@contextmanager
def serving_objects(**objects: bytes) -> Iterator[tuple[str, Shelves]]:
    """Serve objects for the duration of a block; yields the URL of `root/` and the shelves."""
    shelves = Shelves(dict(objects))
    with serving(Handler, shelves) as url:
        yield f"{url}/root", shelves


@contextmanager
def serving(kind: type[Handler], shelves: Shelves, **more: object) -> Iterator[str]:
    """Serve with a handler that has these attributes; yields the URL."""
    handler = type("Handler", (kind,), {"shelves": shelves, **more})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        shelves.released.set()
        shelves.may_list.set()
        server.shutdown()
        server.server_close()
        thread.join()
