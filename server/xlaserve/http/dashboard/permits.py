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
    """Return the models that pages show a client: those of its page whose metadata it may read.

    Without a permission for metadata, all those of its page.
    """
    shows = everything if call.sight is None else call.sight.shows
    reads = permits(call, Operation.METADATA)
    if reads is everything or reads is nothing:
        return shows
    if shows is everything:
        return reads
    return lambda model: shows(model) and reads(model)


def models_told(permits: Permits, call: Call) -> Sees:
    """Return the models whose events a client is told: those shown.

    A page of all models without metadata tells of none.
    """
    return permits(call, Operation.METADATA) if call.sight is None else models_shown(permits, call)
