"""The JAX and xlaserve versions that wrote an export, stored in one manifest field.

Older servers would reject a manifest with an additional field.
"""

from typing import NamedTuple

from xlaserve import build

_BETWEEN = ", xlaserve "
_MOST = 64
"""Maximum number of characters from a file that are shown in an error."""


class Writer(NamedTuple):
    """The versions that wrote a file."""

    jax: str
    xlaserve: str = ""
    """xlaserve version; empty in files of older versions."""

    @classmethod
    def of(cls, text: str) -> "Writer":
        """Parse the manifest's field."""
        jax, _, xlaserve = text.partition(_BETWEEN)
        return cls(jax, xlaserve)

    @property
    def text(self) -> str:
        """Return the field's text."""
        return f"{self.jax}{_BETWEEN}{self.xlaserve}" if self.xlaserve else self.jax


def not_read(name: str, found: str, reads: str, text: str) -> str:
    """Explain that a file's format is too new for this server, and which version reads it.

    `found` and `reads` name the formats; `text` is the file's record of its writer.
    """
    wrote = "".join(char for char in Writer.of(text).xlaserve[:_MOST] if char.isprintable())
    who = f"xlaserve {wrote} (which wrote it) or newer" if wrote else "a newer xlaserve"
    return (
        f"{name} {found}, this server reads {reads} (xlaserve {build.version()}): serve it with "
        f"{who}, or export the model again with this one"
    )
