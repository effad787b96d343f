"""An HTTP server of objects on the loopback, which cuts, lies and stalls when it is told to."""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote

Fault = Callable[["Handler", bytes], bool]
"""Answers a GET of an object in its own way; returns False to leave it to the server."""


@dataclass
class Shelves:
    """The objects of a server, and how it treats them."""

    objects: dict[str, bytes] = field(default_factory=dict)
    """By path, without a slash before it."""
    fault: Fault | None = None
    is_away: bool = False
    """Whether every request is answered with 503."""
    pages: dict[str, bytes] = field(default_factory=dict)
    """Pages of directories that are not made of the objects."""
    may_list: threading.Event = field(default_factory=threading.Event)
    """Waited for before a page of a directory is answered; it is set unless a test clears it."""
    pages_left: threading.Semaphore | None = None
    """Counts the pages of directories that may still be answered; None for any."""
    failing: dict[tuple[str, str], int] = field(default_factory=dict)
    """How many more requests of a method and a path fail."""
    failure: "Callable[[Handler], object]" = lambda handler: handler.head("", 0, 503)
    """How those fail."""
    turns: threading.Semaphore | None = None
    """Taken by each HEAD, where a test says when these may be answered."""
    heads_at_once: list[int] = field(default_factory=lambda: [0, 0])
    """HEAD requests in progress, and the most that there were."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and Range of every request."""
    released: threading.Event = field(default_factory=threading.Event)
    """Set at the end, for faults that stall."""

    def __post_init__(self) -> None:
        """List at once."""
        self.may_list.set()

    def gets(self) -> list[str]:
        """Return the paths of all GET requests for objects."""
        return [path for method, path, _ in self.asked if method == "GET" and path in self.objects]

    def etag(self, path: str) -> str:
        """Return what changes with an object."""
        return f'"{hashlib.sha256(self.objects[path]).hexdigest()[:16]}"'


class Handler(BaseHTTPRequestHandler):
    """Serves objects with ranges and ETags, and directories as pages of links."""

    protocol_version = "HTTP/1.1"
    shelves: Shelves

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Answer with the size and the ETag of an object."""
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
        """Answer with an object, or with the page of a directory."""
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
        """Return the part of an object that is asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else (0, size)

    def head(self, path: str, length: int | None, status: int = 200, **more: str) -> None:
        """Send a status and headers; a length of None is not said."""
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
        """Return an object, or the page of a directory; empty if there is neither."""
        if path in self.shelves.objects:
            return self.shelves.objects[path]
        below = {name.removeprefix(path) for name in self.shelves.objects if name.startswith(path)}
        entries = {re.sub(r"/.*", "/", name) for name in below}
        made = "".join(f'<a href="{quote(entry)}">x</a>' for entry in sorted(entries))
        return self.shelves.pages.get(path, made.encode())

    @property
    def name(self) -> str:
        """Return the path that is asked for."""
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
        """Say nothing of clients that left."""


@contextmanager
def serving_objects(**objects: bytes) -> Iterator[tuple[str, Shelves]]:
    """Serve objects for the length of a block; yields the URL of `root/` and the shelves."""
    shelves = Shelves(dict(objects))
    handler = type("Handler", (Handler,), {"shelves": shelves})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/root", shelves
    finally:
        shelves.released.set()
        shelves.may_list.set()
        server.shutdown()
        server.server_close()
        thread.join()
