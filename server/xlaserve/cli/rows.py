"""The terminal's display of the rows of a model that was exported or imported."""

from collections.abc import Sequence

from xlaserve.models.manifest import Manifest


def rows_shown(described: Manifest, notices: Sequence[str]) -> Sequence[str]:
    """Return the lines that say what is proved of them, or why requests are not put together."""
    if notices or described.verdict is None:
        return notices
    return [f"rows are {described.verdict}"]
