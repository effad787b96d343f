"""Detects layers of Flax, Equinox, Haiku and Keras traced in training mode."""

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import FrameType
from typing import Any

from xlaserve.artifact.training_layers import LAYERS, Layer
from xlaserve.errors import InvalidModel

_FRAMEWORKS = ("flax", "equinox", "haiku", "keras")
_NAMES = frozenset(name for _, name in LAYERS)


def refused_in_training(fn: Callable[..., object]) -> Callable[..., object]:
    """Wrap `fn` to raise InvalidModel if a layer is called in training mode.

    Inspects the layers' local variables while `fn` is traced. They show the mode that the layer has
    chosen, which the lowered computation only suggests.
    """
    if not any(name in sys.modules for name in _FRAMEWORKS):
        return fn

    @wraps(fn, updated=())
    def watched(*args: Any, **kwargs: Any) -> object:
        found: list[Layer] = []
        before = sys.getprofile()

        def profile(frame: FrameType, event: str, value: object) -> None:
            # On return, the locals show the mode that was chosen; the value is None after an
            # exception.
            if event == "return" and value is not None and frame.f_code.co_qualname in _NAMES:
                layer = LAYERS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_qualname))
                if layer is not None and _trains(layer, frame.f_locals):
                    found.append(layer)

        sys.setprofile(profile)
        try:
            result = fn(*args, **kwargs)
        finally:
            sys.setprofile(before)
        if found:
            raise InvalidModel(_message(found))
        return result

    return watched


def _trains(layer: Layer, variables: Mapping[str, object]) -> bool:
    if layer.rate and not getattr(variables.get("self"), layer.rate, 0):
        return False
    mode = variables.get(layer.local)
    return mode is not None and bool(mode) == layer.trains


def _message(found: list[Layer]) -> str:
    first, kinds = found[0], dict.fromkeys(found)
    others = ", ".join(layer.name for layer in list(kinds)[1:])
    return (
        f"the function looks like training mode: {first.name} {first.does}"
        f"{f' (and {others})' if others else ''}; {first.advice}, or export it unchanged with"
        " training_mode=True"
    )
