"""Untrusted text, escaped for a terminal."""


def printable(text: str) -> str:
    """Escape control characters, so that the text cannot move the cursor or add lines."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
