"""The models that made an answer, which may be kept while they are the same."""

import weakref
from collections.abc import Callable, Iterable
from typing import TypeAlias

from xlaserve.errors import XlaserveError
from xlaserve.serving.call import Call

Use: TypeAlias = "tuple[str, str, weakref.ref[object] | None]"
"""Name and asked version (empty for the newest) of a model, and the instance that was found.

None where none was: an answer made without it may be kept while there is none.
"""

Resolve: TypeAlias = Callable[[str, str], tuple[object, object]]
"""Returns the version of a model that answers and its instance; raises where none does."""


def use_of(name: str, number: str, instance: object | None) -> Use:
    """Return the use of a model, or of its absence."""
    return name, number, None if instance is None else weakref.ref(instance)


def note(call: Call | None, uses: Iterable[Use]) -> None:
    """Note that the answer to a call, and to those that it is part of, is made with models.

    So are the answers to their companions: code that answers calls together asks once for all.
    """
    found = tuple(uses)
    if not found:
        return
    seen: set[Call] = set()
    waiting = [call]
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        if one.uses is not None:
            one.uses.update(found)
        waiting.append(one.parent)
        waiting.extend(companion() for companion in one.companions)


def are_current(uses: Iterable[Use], resolve: Resolve) -> bool:
    """Tell whether all models are still the instances that were used, or as absent as then."""
    return all(_is_current(use, resolve) for use in uses)


def _is_current(use: Use, resolve: Resolve) -> bool:
    name, number, used = use
    try:
        instance = resolve(name, number)[1]
    except XlaserveError:
        return used is None
    return used is not None and instance is used()
