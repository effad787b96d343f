"""Nesting of lists in JSON, from their brackets and commas."""

from xlaserve.tensors import TensorDataError

UNSTRUCTURED = bytes(octet for octet in range(256) if octet not in b"[],")
"""Everything but brackets and commas."""


def list_lengths(structure: bytes) -> list[int]:
    """Return how long the lists are, innermost first.

    Raises TensorDataError if those of a level differ. An empty list cannot be told from one of a
    single element here.
    """
    skeleton = structure.translate(None, UNSTRUCTURED)
    depth = len(skeleton) - len(skeleton.lstrip(b"["))
    lengths: list[int] = []
    first, closing = slice(depth, depth), depth
    for level in range(1, depth + 1):
        # Where all is regular, this many brackets close the first list of the level.
        closing = skeleton.find(b"]" * level, closing)
        items = slice(depth - level + 1, closing + level - 1)
        length = (items.stop - items.start + 1) // (first.stop - first.start + 1)
        if closing < 0 or length < 1 or not _repeats(skeleton, first, length, items):
            raise irregular()
        lengths.append(length)
        first = slice(items.start - 1, items.stop + 1)
    if first.stop != len(skeleton):
        raise irregular()
    return lengths


def _repeats(skeleton: bytes, first: slice, length: int, items: slice) -> bool:
    if length == 1:
        return first == items
    item = skeleton[first]
    return skeleton[items] == (item + b",") * (length - 1) + item


def irregular() -> TensorDataError:
    """Return the error for irregularly nested lists."""
    return TensorDataError(
        "data in one list, or in nested lists that are equally long on each level",
        "lists that differ",
    )
