"""Models that a cached answer depends on: the answer is valid while they are unchanged."""

import weakref
from collections.abc import Callable, Iterable
from typing import TypeAlias

from xlaserve.errors import XlaserveError
from xlaserve.serving.call import Call

Use: TypeAlias = "tuple[str, str, weakref.ref[object] | None]"
"""Model name, requested version (empty for the newest), and the instance found.

The instance is None if the model was absent: the answer is then valid while it remains absent.
"""

Resolve: TypeAlias = Callable[[str, str], tuple[object, object]]
"""Returns the version and the instance of a model; raises if it is unavailable."""


def use_of(name: str, number: str, instance: object | None) -> Use:
    """Return the record that an answer used a model, or found it absent."""
    return name, number, None if instance is None else weakref.ref(instance)


def note(call: Call | None, uses: Iterable[Use]) -> None:
    """Record the models used for a call's answer, in the call and in its parents.

    Its companions get the same record: code that answers calls together sends nested calls for all.
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
    """Tell whether all models are still the same instances, or still absent."""
    return all(_is_current(use, resolve) for use in uses)


def _is_current(use: Use, resolve: Resolve) -> bool:
    name, number, used = use
    try:
        instance = resolve(name, number)[1]
    except XlaserveError:
        return used is None
    return used is not None and instance is used()
