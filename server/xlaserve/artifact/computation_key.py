"""The key of a computation, shared by equal programs and loads."""

import hashlib


def of(module: bytes, outline: object) -> str:
    """Return a computation's key: a hash of its module and its calling convention.

    There are no parameters in it, and no word of a file: it follows from what is compiled.
    """
    digest = hashlib.sha256(repr(outline).encode())
    digest.update(module)
    return digest.hexdigest()
