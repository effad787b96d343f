"""Nesting of JSON lists, determined from brackets and commas."""

from xlaserve.tensors import TensorDataError

UNSTRUCTURED = bytes(octet for octet in range(256) if octet not in b"[],")
"""Every byte except brackets and commas."""


def list_lengths(structure: bytes) -> list[int]:
    """Return the length of the lists on each level, innermost first.

    Raises TensorDataError if lists on the same level differ. An empty list counts as one element.
    """
    skeleton = structure.translate(None, UNSTRUCTURED)
    depth = len(skeleton) - len(skeleton.lstrip(b"["))
    lengths: list[int] = []
    first, closing = slice(depth, depth), depth
    for level in range(1, depth + 1):
        # In regular nesting, the first run of this many brackets closes the level's first list.
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
        "data in one list, or in nested lists of equal length on each level",
        "lists of different lengths",
    )
