"""The tokens that a grammar allows next in a request."""

from typing import NamedTuple, Protocol

from xlaserve.tensors import Tensor


class Grammar(NamedTuple):
    """The grammar that a request asks for."""

    parameter: str
    """One of GRAMMARS: its parameter."""
    text: str


GRAMMARS = ("json_schema", "regex", "grammar")
"""Grammar parameters, of which a request may have one."""


class Constraint(Protocol):
    """The place of one answer in its grammar. One thread calls it."""

    def fill(self, words: Tensor) -> None:
        """Set the bits of the tokens that may come next, int32[mask_words(vocab)].

        Raises InvalidParameter where the grammar became too large to say.
        """

    def take(self, token: int) -> bool:
        """Advance by a token; True at the end. Raises InvalidParameter."""
        ...
