"""Parsing of request header blocks by llhttp, and the framing of bodies."""

import re
from http import HTTPStatus

import httptools
from multidict import CIMultiDict, CIMultiDictProxy

_END = b"\r\n\r\n"
_BREAK = b"\r\n"
_NOTHING_YET = frozenset({b"", b"\r"})
_MOST_FIELDS = 128
_MOST_LONG_LINES = 8
"""Maximum size of a header block, as a multiple of the longest allowed line."""
_VERSION = re.compile(rb"(?P<method>[!-~]+) +[!-~]+ HTTP/(?P<version>[0-9]\.[0-9])(?:\r|$)")
_VERSIONS = frozenset({b"1.0", b"1.1"})
_PREFACE = b"PRI"
"""Method of the HTTP/2 preface (RFC 9113, 3.4), which is not a request of any version."""
_ABSOLUTE = re.compile(r"https?://(?P<authority>[^/?#]*)(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
"""A request target in absolute form (RFC 9112, 3.2.2)."""
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@,\s]*)(:[0-9]*)?")


class Malformed(Exception):
    """A malformed header block, or one that asks for an unsupported feature."""

    def __init__(self, text: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(text)
        self.status = status


class HeadParser:
    """Parses one header block, which may arrive in parts.

    A malformed block is refused as soon as possible. A block ends at its first empty line; llhttp
    never sees the bytes after it and must agree that the block is complete.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_bytes = max_line_bytes
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._is_whole = False
        self._has_begun = False
        self._skipped = 0
        """Number of bytes of empty lines before the block."""
        self._position = 0
        """Offset up to which llhttp has parsed."""
        self._url = b""
        self._fields: list[tuple[str, str]] = []
        self.block = bytearray()
        """The received bytes; once the block is complete, exactly the block."""
        self.method = ""
        self.target = ""
        """The target in origin form, also if the client sent it in absolute form; `*` and the
        authority form are unchanged."""
        self.written_target = ""
        """The target exactly as in the request line."""
        self.is_1_1 = True
        """Whether the version is HTTP/1.1; otherwise it is HTTP/1.0."""
        self.keeps_alive = True
        self.length: int | None = 0
        """Length of the body in bytes; None for a chunked body."""
        self.headers: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())

    def feed(self, data: bytes) -> int | None:
        """Parse bytes; return how many of them belong to the block, or None if it is incomplete.

        Raises Malformed.
        """
        block = self.block
        before = len(block)
        block += data
        if not self._has_begun:
            self._skip_empty_lines()
            if bytes(block[self._skipped :]) in _NOTHING_YET:
                return None
            self._has_begun = True
            self._position = self._skipped
        found = block.find(_END, max(self._skipped, before - len(_END) + 1))
        end = found + len(_END) if found >= 0 else len(block)
        if end - self._skipped > _MOST_LONG_LINES * self._max_bytes:
            most = _MOST_LONG_LINES * self._max_bytes
            raise Malformed(f"request line and headers are longer than {most} bytes")
        self._parse(bytes(block[self._position : end]))
        self._position = end
        if found < 0:
            return None
        if not self._is_whole:
            raise Malformed("the header block does not end at its first empty line")
        self.block = block[self._skipped : end]
        self._parser = None  # breaks a reference cycle
        self._read_fields()
        return end - before

    def _skip_empty_lines(self) -> None:
        """Skip empty lines before a request (RFC 9112, 2.2)."""
        while self.block.startswith(_BREAK, self._skipped):
            self._skipped += len(_BREAK)
        if self._skipped > self._max_bytes:
            raise Malformed("the request is empty")

    def _parse(self, data: bytes) -> None:
        parser = self._parser
        if parser is None or not data:
            return
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # the server ignores requests to upgrade
        except httptools.HttpParserError as error:
            cause = error.__context__
            if isinstance(cause, Malformed):
                raise cause from None
            self._check_version(self._skipped)
            raise Malformed(str(error)) from None

    # --- Callbacks of llhttp ---

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._max_bytes:
            raise Malformed(f"the request line is longer than {self._max_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) + len(value) > self._max_bytes:
            raise Malformed(f"a header is longer than {self._max_bytes} bytes")
        if len(self._fields) >= _MOST_FIELDS:
            raise Malformed(f"more than {_MOST_FIELDS} headers")
        text = value.strip(b" \t").decode(errors="surrogateescape")
        self._fields.append((name.decode("ascii"), text))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._is_whole = True
        self.method = self._parser.get_method().decode("ascii")
        self.is_1_1 = self._parser.get_http_version() == "1.1"

    # --- Interpretation of the header block ---

    def _check_version(self, begin: int) -> None:
        """Refuse unsupported HTTP versions before reporting any other error."""
        found = _VERSION.match(self.block, begin)
        if found is None or found["method"] == _PREFACE:
            return
        version = found["version"]
        if version not in _VERSIONS:
            raise Malformed(
                f"HTTP/{version.decode()} is not supported, expected HTTP/1.1",
                HTTPStatus.HTTP_VERSION_NOT_SUPPORTED,
            )

    def _read_fields(self) -> None:
        self._check_version(0)
        if _VERSION.match(self.block) is None:
            raise Malformed("the request line does not end in an HTTP version")
        headers = CIMultiDict(self._fields)
        self.headers = CIMultiDictProxy(headers)
        self._read_target(headers)
        self._read_framing(headers)
        options = tokens(headers, "Connection")
        self.keeps_alive = "close" not in options and (self.is_1_1 or "keep-alive" in options)

    def _read_target(self, headers: CIMultiDict[str]) -> None:
        """Validate target and Host; an absolute-form target overrides Host (RFC 9112, 3.2.2)."""
        hosts = headers.getall("Host", ())
        if len(hosts) > 1:
            raise Malformed("more than one Host header")
        if not hosts and self.is_1_1:
            raise Malformed("no Host header")
        self.target = self.written_target = target = self._url.decode(errors="surrogateescape")
        if target[:1] == "/":
            return
        found = _ABSOLUTE.fullmatch(target)
        if found is None:
            if target == "*" and self.method != "OPTIONS":
                raise Malformed("the target * is only valid for OPTIONS")
            return
        authority = found["authority"]
        if not authority or _HOST.fullmatch(authority) is None:
            raise Malformed("the target's authority is not a valid host")
        headers["Host"] = authority
        rest = found["rest"]
        if not rest and self.method == "OPTIONS":
            rest = "*"  # RFC 9112, 3.2.4
        self.target = rest if rest[:1] in ("/", "*") else "/" + rest

    def _read_framing(self, headers: CIMultiDict[str]) -> None:
        """Determine the body length (RFC 9112, 6.3); llhttp has refused ambiguous framing."""
        length = headers.get("Content-Length")
        if "Transfer-Encoding" not in headers:
            self.length = int(length) if length is not None else 0
            return
        codings = tokens(headers, "Transfer-Encoding")
        if length is not None:
            raise Malformed("expected either Transfer-Encoding or Content-Length, got both")
        if not self.is_1_1:
            raise Malformed("HTTP/1.0 has no Transfer-Encoding")
        if codings.count("chunked") != 1 or codings[-1] != "chunked":
            raise Malformed("Transfer-Encoding does not end in one 'chunked'")
        if len(codings) > 1:
            raise Malformed(
                f"the transfer coding '{codings[0]}' is not supported, expected 'chunked'",
                HTTPStatus.NOT_IMPLEMENTED,
            )
        self.length = None


def tokens(headers: CIMultiDict[str] | CIMultiDictProxy[str], name: str) -> list[str]:
    """Return the members of a list header in lower case, skipping empty ones (RFC 9110, 5.6.1)."""
    members = ",".join(headers.getall(name, ())).lower().split(",")
    return [member for text in members if (member := text.strip(" \t"))]
