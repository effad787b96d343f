"""The container of a serialized module: sections of MLIR bytecode."""

_MAGIC = b"ML\xefR"
_STRINGS = 0
"""The id of the section with all names: of operations, functions, files, attributes."""
_IS_ALIGNED = 0x80
_WIDEST = 8


def names_in(module: bytes) -> bytes:
    """Return the part of a module that has its names: a search need not pass over its constants.

    All of it where it is no bytecode of this form.
    """
    try:
        return _section(module, _STRINGS)
    except (IndexError, ValueError):
        return module


def _section(module: bytes, wanted: int) -> bytes:
    """Return a section's bytes; raises IndexError or ValueError for another format."""
    if not module.startswith(_MAGIC):
        raise ValueError("no bytecode of MLIR")
    _, at = _number(module, len(_MAGIC))
    at = module.index(0, at) + 1  # who wrote it
    while True:
        kind = module[at]
        length, at = _number(module, at + 1)
        if kind & _IS_ALIGNED:
            alignment, at = _number(module, at)
            at += -at % alignment if alignment else 0
        if kind & ~_IS_ALIGNED == wanted:
            if at + length > len(module):
                raise ValueError("the section ends behind the module")
            return module[at : at + length]
        at += length


def _number(module: bytes, at: int) -> tuple[int, int]:
    """Read a number, whose first byte says by its lowest set bit how many follow, and the end."""
    first = module[at]
    if not first:
        return int.from_bytes(module[at + 1 : at + 1 + _WIDEST], "little"), at + 1 + _WIDEST
    size = (first & -first).bit_length()
    return int.from_bytes(module[at : at + size], "little") >> size, at + size
