"""Which errors of JAX and Python mean that there is no memory left."""

import re

from jax.errors import JaxRuntimeError

from xlaserve.errors import OutOfMemory

_EXHAUSTED = re.compile(r"([^\n]*: )?RESOURCE_EXHAUSTED: ")
"""How an error of XLA begins that is about memory: with its status, or that of its cause. The same
words elsewhere may be names of the model's."""


def is_exhausted(error: Exception) -> bool:
    """Tell whether an error of JAX or Python means that there is no memory left."""
    exhausted = isinstance(error, JaxRuntimeError) and _EXHAUSTED.match(str(error))
    return isinstance(error, MemoryError) or bool(exhausted)


def raise_if_exhausted(model: str, error: Exception) -> None:
    """Raise OutOfMemory if that is what an error of JAX or Python means."""
    if isinstance(error, MemoryError):
        raise OutOfMemory(model, "the host has no memory left") from error
    if is_exhausted(error):
        raise OutOfMemory(model, str(error).splitlines()[0][:300]) from error
