"""A local S3 server (moto) in the test process, and a proxy that fails some of its requests."""

import importlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from support.object_server import Handler, Shelves, serving
from support.store_failures import FAILURES, Failure
from support.tools import missing

BUCKET = "bucket"
_ADDRESS = "AWS_ENDPOINT_URL"
_HOP_BY_HOP = ("connection", "transfer-encoding", "server", "date")


class _Proxy(Handler):
    """Forwards requests, except the `failing` ones, which are named by what they ask for."""

    behind: str

    def do_GET(self) -> None:
        """Forward a request for a listing, the metadata of an object, or an object."""
        asked = (self.command, "listing" if "list-type=" in self.path else self.name)
        shelves = self.shelves
        shelves.asked.append((*asked, self.headers.get("Range", "")))
        if left := shelves.failing.get(asked, 0):
            shelves.failing[asked] = left - 1
            shelves.failure(self)
            return
        status, headers, content = self._forwarded()
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_HEAD = do_GET

    def content(self, path: str) -> bytes:
        """Return the body of the answer."""
        return self._forwarded()[2]

    def _forwarded(self) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = HTTPConnection(self.behind)
        try:
            connection.request(self.command, self.path, headers=dict(self.headers))
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


def _refused(status: int, code: str) -> Callable[[Handler], None]:
    """Return a function that answers as S3 does."""
    body = f"<Error><Code>{code}</Code><Message>refused</Message></Error>".encode()

    def answer(handler: Handler) -> None:
        is_head = handler.command == "HEAD"
        handler.head("", 0 if is_head else len(body), status, Content_Type="application/xml")
        if not is_head:
            handler.wfile.write(body)

    return answer


_FAILED = "its SDK failed with "
S3_FAILURES: Mapping[str, Failure] = {
    "503 SlowDown": Failure(_refused(503, "SlowDown"), _FAILED),
    "500": Failure(_refused(500, "InternalError"), _FAILED),
    "reset": replace(FAILURES["reset"], text=_FAILED),
    "reset in the middle": replace(FAILURES["reset in the middle"], text=_FAILED),
    "short body": replace(FAILURES["short body"], text=_FAILED),
    "403": Failure(_refused(403, "AccessDenied"), "access is denied", again=frozenset()),
    "404": Failure(_refused(404, "NoSuchKey"), "it does not exist", status=400, again=frozenset()),
}
"""Failures of S3, and the expected error of a load; marks and pages are as in `FAILURES`."""


@contextmanager
def failing_bucket() -> Iterator[Shelves]:
    """Put a proxy in front of the bucket for the duration of a block; yields its faults."""
    before = os.environ[_ADDRESS]
    shelves = Shelves()
    with serving(_Proxy, shelves, behind=urlsplit(before).netloc) as url:
        os.environ[_ADDRESS] = url
        try:
            yield shelves
        finally:
            os.environ[_ADDRESS] = before


@contextmanager
def serving_bucket(objects: Mapping[str, bytes]) -> Iterator[Any]:
    """Serve a bucket for the duration of a block; yields a boto3 client.

    Sets address and credentials in the environment, as an operator would.
    """
    try:
        moto: Any = importlib.import_module("moto.server")
        importlib.import_module("s3fs")
        boto3: Any = importlib.import_module("boto3")
    except ImportError as error:
        missing(f"{error.name} is not installed")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    os.environ |= {
        _ADDRESS: f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        for name, content in objects.items():
            client.upload_fileobj(io.BytesIO(content), BUCKET, name)
        yield client
    finally:
        server.stop()
        os.environ.clear()
        os.environ.update(before)
