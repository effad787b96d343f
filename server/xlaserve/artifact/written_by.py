"""The versions of JAX and xlaserve that wrote an export, as its manifest records them.

A field of its own would be refused by every build that does not know it.
"""

from typing import NamedTuple

from xlaserve import build

_BETWEEN = ", xlaserve "
_MOST = 64
"""Displayed characters of a file's own text."""


class Writer(NamedTuple):
    """Versions of a file's writer."""

    jax: str
    xlaserve: str = ""
    """Empty in older files."""

    @classmethod
    def of(cls, text: str) -> "Writer":
        """Parse the field of a manifest."""
        jax, _, xlaserve = text.partition(_BETWEEN)
        return cls(jax, xlaserve)

    @property
    def text(self) -> str:
        """Return it as in a manifest."""
        return f"{self.jax}{_BETWEEN}{self.xlaserve}" if self.xlaserve else self.jax


def not_read(name: str, found: str, reads: str, text: str) -> str:
    """Explain that a file's format is too new for this build, and which build reads it.

    `found` and `reads` say which formats; `text` is what the file says of its writer.
    """
    wrote = "".join(char for char in Writer.of(text).xlaserve[:_MOST] if char.isprintable())
    who = f"xlaserve {wrote}, which wrote it, or a newer one" if wrote else "the newer xlaserve"
    return (
        f"{name} {found}, this server reads {reads} (xlaserve {build.version()}): serve it with "
        f"{who}, or export the model again with this one"
    )
