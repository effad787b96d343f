"""Untrusted text, escaped for a terminal."""


def printable(text: str) -> str:
    """Escape control characters: what is shown cannot move the cursor or end a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
