"""Checks symbolic dimensions against a bounded grammar before JAX parses them.

JAX evaluates while it parses: `s^200000000` takes a minute and gigabytes. Only this module calls
`jax.export.symbolic_shape`.

    shape      = [ expression { "," expression } [ "," ] ]
    expression = [ "+" | "-" ] term { ("+" | "-") term }
    term       = factor { "*" factor }
    factor     = atom [ "^" number ]
    atom       = [ "-" ] number | name | operation "(" expression "," expression ")"
    operation  = "floordiv" | "mod" | "max" | "min"
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.export
from jax.export import SymbolicScope

from xlaserve.errors import InvalidModel

MAX_CHARACTERS = 4096
"""Maximum length of a shape's text."""

MAX_DEPTH = 32
"""Maximum nesting of operations such as `max`."""

MAX_TERMS = 512
"""Maximum number of terms in a dimension, after expansion."""

MAX_DEGREE = 32
"""Maximum number of factors in a term."""

MAX_BITS = 128
"""Maximum size of any number in a dimension's evaluation, in bits."""

MAX_TERMS_OF_ALL = 16_384
"""Maximum number of symbolic terms in all dimensions of an artifact."""

_OPERATIONS = frozenset({"floordiv", "mod", "max", "min"})
_TOKEN = re.compile(r"\s*(?:(?P<number>[0-9]+)|(?P<name>[^\W\d]\w*)|(?P<sign>[-+*^(),]))")
_SHOWN_CHARACTERS = 64
_RELATION = re.compile(r">=|<=|==")


@dataclass(frozen=True, slots=True)
class _Size:
    """Upper bounds for an expression after JAX has expanded it."""

    terms: int = 1
    degree: int = 0
    bits: int = 0

    def plus(self, other: "_Size") -> "_Size":
        return _Size(
            self.terms + other.terms,
            max(self.degree, other.degree),
            max(self.bits, other.bits) + 1,
        )

    def times(self, other: "_Size") -> "_Size":
        return _Size(self.terms * other.terms, self.degree + other.degree, self.bits + other.bits)

    def power(self, exponent: int) -> "_Size":
        return _Size(
            self.terms ** min(exponent, MAX_DEGREE + 1),
            self.degree * exponent,
            self.bits * exponent,
        )

    def operation(self, other: "_Size") -> "_Size":
        """Bound the size of an operation such as max, which JAX may simplify to either operand."""
        return _Size(
            self.terms + other.terms, self.degree + other.degree + 1, self.bits + other.bits + 1
        )


def symbolic(
    text: str, scope: SymbolicScope | None = None, *, constraints: Sequence[str] = ()
) -> tuple[Any, ...]:
    """Parse the dimensions of a shape: integers, or JAX expressions in the given scope.

    Raises InvalidModel for a text outside the grammar or its bounds, or that JAX rejects.
    """
    check([text, *(side for one in constraints for side in _RELATION.split(one))])
    try:
        return tuple(jax.export.symbolic_shape(text, scope=scope, constraints=tuple(constraints)))
    except ValueError as error:
        raise InvalidModel(f"invalid dimension name: {error}") from error


def check(texts: Iterable[str]) -> None:
    """Raise InvalidModel unless all shapes of an artifact are within the grammar and its bounds."""
    total = sum(_Parser(text).terms() for text in texts)
    if total > MAX_TERMS_OF_ALL:
        raise InvalidModel(
            f"its dimensions have {total} terms in total, expected at most {MAX_TERMS_OF_ALL}"
        )


class _Parser:
    """Parses one shape and computes its bounds, without evaluating it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._depth = 0
        if len(text) > MAX_CHARACTERS:
            raise self._error(f"expected at most {MAX_CHARACTERS} characters, got {len(text)}")
        self._kind, self._token = self._next()

    def terms(self) -> int:
        """Return the number of terms in symbolic dimensions; raises InvalidModel."""
        count = 0
        while self._kind:
            found = self._bounded(self._expression())
            count += found.terms if found.degree else 0
            if self._kind:
                self._take(",")
        return count

    def _expression(self) -> _Size:
        if self._token in ("+", "-"):
            self._advance()
        found = self._term()
        while self._token in ("+", "-"):
            self._advance()
            found = self._bounded(found.plus(self._term()))
        return found

    def _term(self) -> _Size:
        found = self._factor()
        while self._token == "*":
            self._advance()
            found = self._bounded(found.times(self._factor()))
        return found

    def _factor(self) -> _Size:
        found = self._atom()
        if self._token != "^":
            return found
        self._advance()
        return self._bounded(found.power(self._number()))

    def _atom(self) -> _Size:
        if self._token == "-":
            self._advance()
            return _Size(bits=self._number().bit_length())
        if self._kind == "number":
            return _Size(bits=self._number().bit_length())
        if self._kind != "name":
            raise self._error(f"expected a name or a number at {self._here()}")
        name = self._token
        self._advance()
        return self._operation() if name in _OPERATIONS else _Size(degree=1)

    def _operation(self) -> _Size:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"its operations are nested deeper than {MAX_DEPTH}")
        self._take("(")
        left = self._expression()
        self._take(",")
        right = self._expression()
        self._take(")")
        self._depth -= 1
        return self._bounded(left.operation(right))

    def _bounded(self, size: _Size) -> _Size:
        for what, found, most in (
            ("terms", size.terms, MAX_TERMS),
            ("factors in a term", size.degree, MAX_DEGREE),
            ("bits in a number", size.bits, MAX_BITS),
        ):
            if found > most:
                raise self._error(f"it may expand to more than {most} {what}")
        return size

    # --- tokenizer ---

    def _number(self) -> int:
        if self._kind != "number":
            raise self._error(f"expected a number at {self._here()}")
        text = self._token
        self._advance()
        # Converting a very long number would be slow; any number above the limit will do.
        return int(text) if len(text) <= MAX_BITS else 1 << MAX_BITS + 1

    def _take(self, sign: str) -> None:
        if self._token != sign:
            raise self._error(f"expected '{sign}' at {self._here()}")
        self._advance()

    def _advance(self) -> None:
        self._kind, self._token = self._next()

    def _next(self) -> tuple[str, str]:
        found = _TOKEN.match(self._text, self._place)
        if found is None:
            if self._text[self._place :].strip():
                raise self._error(f"expected a name, a number or a sign at {self._here()}")
            return "", ""
        self._place = found.end()
        kind = found.lastgroup or ""
        return kind, found[kind]

    def _here(self) -> str:
        return f"character {self._place}"

    def _error(self, problem: str) -> InvalidModel:
        shown = self._text[:_SHOWN_CHARACTERS]
        return InvalidModel(f"dimension '{shown}': {problem}")
