"""The models that the pages show to a client, by its permissions."""

from collections.abc import Callable
from typing import TypeAlias

from xlaserve.serving.access.sight import Sees, everything, nothing
from xlaserve.serving.call import Call, Operation

Permits: TypeAlias = Callable[[Call, Operation], Sees]
"""Returns the models for which the client of a call has a permission."""


def permit_everything(call: Call, operation: Operation) -> Sees:
    """Permit everything, because there are no access rules."""
    return everything


def models_shown(permits: Permits, call: Call) -> Sees:
    """Return the models that pages show: models with page permission and readable metadata.

    If the client may read no metadata at all, those with page permission.
    """
    shows = everything if call.sight is None else call.sight.shows
    reads = permits(call, Operation.METADATA)
    if reads is everything or reads is nothing:
        return shows
    if shows is everything:
        return reads
    return lambda model: shows(model) and reads(model)


def models_in_events(permits: Permits, call: Call) -> Sees:
    """Return the models whose events a client may see: the models that pages show to it.

    If pages are unrestricted but the client may read no metadata at all, it sees no events.
    """
    return permits(call, Operation.METADATA) if call.sight is None else models_shown(permits, call)
