"""The models that made an answer, which may be kept while they are the same."""

import weakref
from collections.abc import Callable, Iterable
from typing import TypeAlias

from xlaserve.errors import XlaserveError
from xlaserve.serving.call import Call

Use: TypeAlias = "tuple[str, str, weakref.ref[object]]"
"""Name and asked version (empty for the newest) of a model, and the instance that was found."""

Resolve: TypeAlias = Callable[[str, str], tuple[object, object]]
"""Returns the version of a model that answers and its instance; raises where none does."""


def use_of(name: str, number: str, instance: object) -> Use:
    """Return the use of a model."""
    return name, number, weakref.ref(instance)


def note(call: Call | None, uses: Iterable[Use]) -> None:
    """Note that the answer to a call, and to those that it is part of, is made with models."""
    found = tuple(uses)
    while call is not None and found:
        if call.uses is not None:
            call.uses.update(found)
        call = call.parent


def are_current(uses: Iterable[Use], resolve: Resolve) -> bool:
    """Tell whether all models are still the instances that were used."""
    try:
        return all(resolve(name, number)[1] is used() for name, number, used in uses)
    except XlaserveError:
        return False
