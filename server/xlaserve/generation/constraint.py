"""Interface of grammar constraints on a request's next token."""

from typing import NamedTuple, Protocol

from xlaserve.tensors import Tensor


class Grammar(NamedTuple):
    """The grammar of a request."""

    parameter: str
    """The request parameter that contains the grammar, one of GRAMMARS."""
    text: str


GRAMMARS = ("json_schema", "regex", "grammar")
"""Request parameters with a grammar; a request may have at most one of them."""


class Constraint(Protocol):
    """The state of an answer within its grammar; used by one thread at a time."""

    def fill(self, words: Tensor) -> bool:
        """Set the bits of the tokens allowed next, int32[mask_words(vocab)].

        Returns False if the grammar has to `grow` first. Raises InvalidParameter if it has become
        too expensive.
        """
        ...

    def grow(self) -> None:
        """Get more memory for the grammar. Blocks; not for the generation thread.

        Raises InvalidParameter.
        """
        ...

    def take(self, token: int) -> bool:
        """Consume a token; return True if no other may follow. Raises InvalidParameter."""
        ...
