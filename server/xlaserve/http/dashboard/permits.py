"""The models that the pages show a client, by its permissions."""

from collections.abc import Callable
from typing import TypeAlias

from xlaserve.serving.access.sight import Sees, everything, nothing
from xlaserve.serving.call import Call, Operation

Permits: TypeAlias = Callable[[Call, Operation], Sees]
"""Returns the models for which the client of a call has a permission."""


def permit_everything(call: Call, operation: Operation) -> Sees:
    """Permit everything: without rules."""
    return everything


def models_shown(permits: Permits, call: Call) -> Sees:
    """Return the models that pages show a client: those whose metadata it may read.

    To a client without that permission, those of which it may see the page: all, unless its rule
    names some.
    """
    sees = permits(call, Operation.METADATA)
    if sees is not nothing:
        return sees
    return everything if call.sight is None else call.sight.shows
