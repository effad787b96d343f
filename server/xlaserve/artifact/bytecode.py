"""Finds a section in MLIR bytecode, the container of a serialized module."""

_MAGIC = b"ML\xefR"
_STRINGS = 0
"""Id of the section with all strings: names of operations, functions, files and attributes."""
_IS_ALIGNED = 0x80
_WIDEST = 8


def names_in(module: bytes) -> bytes:
    """Return the string section of a module, so that a search can skip its constants.

    Returns the whole module if it is not MLIR bytecode of a known form.
    """
    try:
        return _section(module, _STRINGS)
    except (IndexError, ValueError):
        return module


def _section(module: bytes, wanted: int) -> bytes:
    """Return a section's bytes; raises IndexError or ValueError for an unknown format."""
    if not module.startswith(_MAGIC):
        raise ValueError("not MLIR bytecode")
    _, at = _number(module, len(_MAGIC))
    at = module.index(0, at) + 1  # the producer's name
    while True:
        kind = module[at]
        length, at = _number(module, at + 1)
        if kind & _IS_ALIGNED:
            alignment, at = _number(module, at)
            at += -at % alignment if alignment else 0
        if kind & ~_IS_ALIGNED == wanted:
            if at + length > len(module):
                raise ValueError("a section extends past the end of the module")
            return module[at : at + length]
        at += length


def _number(module: bytes, at: int) -> tuple[int, int]:
    """Decode a PrefixVarInt; return its value and the position after it."""
    first = module[at]
    if not first:
        return int.from_bytes(module[at + 1 : at + 1 + _WIDEST], "little"), at + 1 + _WIDEST
    size = (first & -first).bit_length()
    return int.from_bytes(module[at : at + size], "little") >> size, at + size
