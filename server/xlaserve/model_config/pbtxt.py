"""Parses configurations in protobuf's text format."""

import re
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import betterproto

from xlaserve.model_config.schema import (
    ARTICLES,
    MESSAGES,
    BadConfig,
    Draft,
    Field,
    Schema,
    checked_float,
    checked_integer,
    enum_member,
    find_field,
    finite,
    schema_of,
    shown,
)

_TOKEN = re.compile(
    r"""
    (?P<space>(?:[ \t\n\v\f\r]|\#[^\n]*)++)
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<number>(?:[0-9+-]|\.[0-9])[A-Za-z0-9_.+-]*)
    | (?P<string>"(?:[^"\\\n]|\\[^\n])*+"|'(?:[^'\\\n]|\\[^\n])*+')
    | (?P<mark>[{}<>\[\]:,;])
    """,
    re.VERBOSE,
)
_CLOSING = MappingProxyType({"{": "}", "<": ">"})

_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_FLOAT = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?f?", re.IGNORECASE
)
_NOT_FINITE = re.compile(r"-?(?:inf(?:inity)?|nan)", re.IGNORECASE)
_LONGEST = 30
"""Longer than any 64-bit integer, in any base."""
_TRUE = frozenset({"true", "True", "t", "1"})
_FALSE = frozenset({"false", "False", "f", "0"})
_ESCAPE = re.compile(
    rb"""
    \\(?: (?P<octal>[0-7]{1,3}) | x(?P<hex>[0-9a-fA-F]{1,2})
        | u(?P<short>[0-9a-fA-F]{4}) | U(?P<long>[0-9a-fA-F]{8}) | (?P<letter>.) )
    """,
    re.VERBOSE | re.DOTALL,
)
_LETTERS = MappingProxyType(
    dict(zip(b"abfnrtv", (b"\a", b"\b", b"\f", b"\n", b"\r", b"\t", b"\v"), strict=True))
    | {code: bytes([code]) for code in b"\\'\"?"}
)


def read_pbtxt(text: str, schema: Schema) -> betterproto.Message:
    """Parse the text format into a message; unknown fields are errors.

    Raises BadConfig with line and column as its place. Recursion is bounded by the schema, because
    unknown messages are not parsed.
    """
    tokens = _Tokens(text)
    try:
        tokens.advance()
        return _message(tokens, schema, closing="")
    except BadConfig as problem:
        raise problem.within("" if problem.place else tokens.place(tokens.token)) from None


class _Token(NamedTuple):
    kind: str
    text: str
    start: int


class _Tokens:
    """A tokenizer. Errors refer to the current token."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._opened = 0
        self.token = _Token("end", "", 0)

    def advance(self) -> None:
        """Read the next token."""
        start = self.token.start + len(self.token.text)
        match = _TOKEN.match(self._text, start)
        if match and match.lastgroup == "space":
            start = match.end()
            match = _TOKEN.match(self._text, start)
        if match:
            self.token = _Token(str(match.lastgroup), match[0], start)
            return
        self.token = _Token("end", self._text[start : start + 1], start)
        if self.token.text:
            what = "an unterminated string" if self.token.text in "\"'" else self.got
            raise BadConfig.mismatch("a token of the text format", what)

    @property
    def got(self) -> str:
        """The current token, as quoted in errors."""
        return shown(self.token.text) if self.token.text else "the end"

    def place(self, token: _Token) -> str:
        """Return the line and column of a token."""
        line = self._text.count("\n", 0, token.start) + 1
        column = token.start - self._text.rfind("\n", 0, token.start)
        return f"line {line}, column {column}"

    def take(self, mark: str) -> bool:
        """If the current token is this punctuation mark, skip it; return whether it was skipped."""
        if self.token.kind != "mark" or self.token.text != mark:
            return False
        self.advance()
        return True

    def open(self) -> str:
        """Consume the opening mark of a message, and return the matching closing one."""
        closing = _CLOSING.get(self.token.text)
        if closing is None:
            raise BadConfig.mismatch("'{'", self.got)
        self._opened += 1
        if self._opened > MESSAGES:
            raise BadConfig(f"more than {MESSAGES} messages")
        self.advance()
        return closing

    def expect(self, mark: str) -> None:
        """Skip a punctuation mark; raises BadConfig if it is missing."""
        if not self.take(mark):
            raise BadConfig.mismatch(f"'{mark}'", self.got)


def _message(tokens: _Tokens, schema: Schema, closing: str) -> betterproto.Message:
    """Parse fields up to the closing mark, or to the end of the text."""
    draft = Draft(schema)
    while not (tokens.take(closing) if closing else tokens.token.kind == "end"):
        if tokens.token.kind != "name":
            raise BadConfig.mismatch(f"a field or {closing or 'the end'}", tokens.got)
        _field(tokens, draft, find_field(schema.by_name, tokens.token.text))
        _ = tokens.take(",") or tokens.take(";")
    return draft.finish()


def _field(tokens: _Tokens, draft: Draft, field: Field) -> None:
    if not field.repeated and field.kind != "map":
        draft.claim(field)
        draft.choose(field)
    tokens.advance()
    if not tokens.take(":") and not field.message:
        raise BadConfig.mismatch(f"':' after {field.name}", tokens.got)
    if field.kind == "map":
        _entries(tokens, draft, field)
    elif field.repeated:
        draft.append(field, _values(tokens, field))
    else:
        draft.set(field, _value(tokens, field))


def _entries(tokens: _Tokens, draft: Draft, field: Field) -> None:
    first = tokens.token
    for entry in _values(tokens, field):
        try:
            draft.put(field, entry.key, entry.value)
        except BadConfig as problem:
            raise problem.within(tokens.place(first)) from None


def _values(tokens: _Tokens, field: Field) -> list[Any]:
    """Parse one value of a repeated field, or a list of values."""
    if not tokens.take("["):
        return [_value(tokens, field)]
    values: list[object] = []
    while not tokens.take("]"):
        if values:
            tokens.expect(",")
        values.append(_value(tokens, field))
    return values


def _value(tokens: _Tokens, field: Field) -> Any:
    if field.message:
        return _message(tokens, schema_of(field.message), tokens.open())
    return _SCALARS[field.kind](tokens, field)


def _integer(tokens: _Tokens, field: Field) -> int:
    number = _number(tokens.token)
    if number is None:
        raise BadConfig.mismatch(ARTICLES[field.kind], tokens.got)
    value = checked_integer(field, number)
    tokens.advance()
    return value


def _number(token: _Token) -> int | None:
    if token.kind != "number" or not _INTEGER.fullmatch(token.text) or len(token.text) > _LONGEST:
        return None
    digits = token.text.removeprefix("-").lower()
    base = 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10
    return int(token.text, base)


def _float(tokens: _Tokens, field: Field) -> float:
    text = tokens.token.text
    if tokens.token.kind == "number" and _FLOAT.fullmatch(text):
        value = checked_float(field, finite(field, float(text.rstrip("fF"))))
    elif tokens.token.kind != "string" and _NOT_FINITE.fullmatch(text):
        value = float(text)
    else:
        raise BadConfig.mismatch(ARTICLES[field.kind], tokens.got)
    tokens.advance()
    return value


def _bool(tokens: _Tokens, field: Field) -> bool:
    text = tokens.token.text
    if text not in _TRUE and text not in _FALSE:
        raise BadConfig.mismatch(ARTICLES[field.kind], tokens.got)
    tokens.advance()
    return text in _TRUE


def _enum(tokens: _Tokens, field: Field) -> betterproto.Enum:
    number = _number(tokens.token)
    member = enum_member(field, tokens.token.text if number is None else number)
    tokens.advance()
    return member


def _string(tokens: _Tokens, field: Field) -> str:
    first = tokens.token
    data = _bytes(tokens, field)
    try:
        return data.decode()
    except UnicodeDecodeError:
        problem = BadConfig.mismatch("a string in UTF-8", "other bytes")
        raise problem.within(tokens.place(first)) from None


def _bytes(tokens: _Tokens, field: Field) -> bytes:
    """Parse adjacent string literals, which are concatenated."""
    if tokens.token.kind != "string":
        raise BadConfig.mismatch(ARTICLES[field.kind], tokens.got)
    pieces = []
    while tokens.token.kind == "string":
        body = tokens.token.text[1:-1].encode("utf-8", "surrogatepass")
        pieces.append(_ESCAPE.sub(_unescaped, body))
        tokens.advance()
    return b"".join(pieces)


def _unescaped(escape: re.Match[bytes]) -> bytes:
    digits = escape[escape.lastgroup or 0]
    match escape.lastgroup:
        case "octal" if int(digits, 8) <= 0xFF:
            return bytes([int(digits, 8)])
        case "hex":
            return bytes([int(digits, 16)])
        case "letter" if digits[0] in _LETTERS:
            return _LETTERS[digits[0]]
        case "short" | "long" if int(digits, 16) <= sys.maxunicode:
            return chr(int(digits, 16)).encode("utf-8", "surrogatepass")
    raise BadConfig(f"unknown escape sequence {shown(escape[0].decode(errors='replace'))}")


_SCALARS: Mapping[str, Callable[[_Tokens, Field], object]] = MappingProxyType(
    {
        "int32": _integer,
        "int64": _integer,
        "uint32": _integer,
        "uint64": _integer,
        "float": _float,
        "double": _float,
        "bool": _bool,
        "string": _string,
        "bytes": _bytes,
        "enum": _enum,
    }
)
