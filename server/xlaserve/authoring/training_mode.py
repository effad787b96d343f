"""Detects layers of Flax, Equinox, Haiku and Keras traced in training mode."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from types import FrameType, MappingProxyType
from typing import Any

from xlaserve.errors import InvalidModel

_STATISTICS = "normalises with the statistics of the batch"
_DROPS = "drops elements, the same ones in every request"
_EVAL = "call model.eval() before"
_LINEN = "apply it as in inference: train=False, or whatever sets {local}=True"
_EQUINOX = "export equinox.nn.inference_mode(model)"
_HAIKU = "call it with is_training=False"
_KERAS = "call the model with training=False"


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer that differs in training."""

    name: str
    local: str
    """The local variable with the mode of a call."""
    trains: bool
    """The value of that in training."""
    does: str
    to_do: str
    rate: str = ""
    """Attribute that disables it: when absent or 0, both modes are equal."""


LAYERS: Mapping[tuple[str, str], _Layer] = MappingProxyType(
    {
        ("flax.nnx.nn.normalization", "BatchNorm.__call__"): _Layer(
            "flax.nnx.BatchNorm", "use_running_average", False, _STATISTICS, _EVAL
        ),
        ("flax.nnx.nn.stochastic", "Dropout.__call__"): _Layer(
            "flax.nnx.Dropout", "deterministic", False, _DROPS, _EVAL, "rate"
        ),
        ("flax.linen.normalization", "BatchNorm.__call__"): _Layer(
            "flax.linen.BatchNorm", "use_running_average", False, _STATISTICS, _LINEN
        ),
        ("flax.linen.stochastic", "Dropout.__call__"): _Layer(
            "flax.linen.Dropout", "deterministic", False, _DROPS, _LINEN, "rate"
        ),
        ("equinox.nn._batch_norm", "BatchNorm.__call__"): _Layer(
            "equinox.nn.BatchNorm", "inference", False, _STATISTICS, _EQUINOX
        ),
        ("equinox.nn._dropout", "Dropout.__call__"): _Layer(
            "equinox.nn.Dropout", "inference", False, _DROPS, _EQUINOX, "p"
        ),
        ("haiku._src.batch_norm", "BatchNorm.__call__"): _Layer(
            "haiku.BatchNorm", "is_training", True, _STATISTICS, _HAIKU
        ),
        ("keras.src.layers.normalization.batch_normalization", "BatchNormalization.call"): _Layer(
            "keras.layers.BatchNormalization", "training", True, _STATISTICS, _KERAS
        ),
        ("keras.src.layers.regularization.dropout", "Dropout.call"): _Layer(
            "keras.layers.Dropout", "training", True, _DROPS, _KERAS, "rate"
        ),
    }
)
"""Layers that differ in training, by module and qualified name of their `__call__`."""

_FRAMEWORKS = ("flax", "equinox", "haiku", "keras")
_NAMES = frozenset(name for _, name in LAYERS)


def refused_in_training(fn: Callable[..., object]) -> Callable[..., object]:
    """Wrap `fn` to raise InvalidModel where a layer is in training mode.

    It looks at the calls of layers while `fn` is traced: what their own code makes of its flags is
    certain, where a look at the computation would only guess.
    """
    if not any(name in sys.modules for name in _FRAMEWORKS):
        return fn

    @wraps(fn, updated=())
    def watched(*args: Any, **kwargs: Any) -> object:
        found: list[_Layer] = []
        before = sys.getprofile()

        def profile(frame: FrameType, event: str, value: object) -> None:
            # At the return its variables say what came of all the flags; an error has no value.
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
            raise InvalidModel(_told(found))
        return result

    return watched


def _trains(layer: _Layer, variables: Mapping[str, object]) -> bool:
    if layer.rate and not getattr(variables.get("self"), layer.rate, 0):
        return False
    mode = variables.get(layer.local)
    return mode is not None and bool(mode) == layer.trains


def _told(found: list[_Layer]) -> str:
    first, kinds = found[0], dict.fromkeys(found)
    others = ", ".join(layer.name for layer in list(kinds)[1:])
    return (
        f"the function looks like training mode: {first.name} {first.does}"
        f"{f' (and {others})' if others else ''}; {first.to_do.format(local=first.local)}, or "
        "export it as it is with training_mode=True"
    )
