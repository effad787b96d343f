"""Detects modules exported in training mode, by the layers found in them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jax.extend.mlir import ir

from xlaserve.artifact.bytecode import names_in
from xlaserve.artifact.computation import parsed

_STATISTICS = "normalizes with batch statistics"
_DROPS = "drops elements, the same in every request"
_EVAL = "call model.eval() first"
_LINEN = "apply it in inference mode: train=False, or the argument that sets {local}=True"
_EQUINOX = "export equinox.nn.inference_mode(model)"
_HAIKU = "call it with is_training=False"
_KERAS = "call the model with training=False"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that behaves differently in training."""

    name: str
    local: str
    """Local variable of the layer's `__call__` that selects the mode."""
    trains: bool
    """Value of that variable in training."""
    does: str
    to_do: str
    rate: str = ""
    """Attribute with the dropout rate. If it is missing or 0, both modes are equal."""

    @property
    def advice(self) -> str:
        """Return advice for the user, in the framework's terms."""
        return self.to_do.format(local=self.local)


LAYERS: Mapping[tuple[str, str], Layer] = MappingProxyType(
    {
        ("flax.nnx.nn.normalization", "BatchNorm.__call__"): Layer(
            "flax.nnx.BatchNorm", "use_running_average", False, _STATISTICS, _EVAL
        ),
        ("flax.nnx.nn.stochastic", "Dropout.__call__"): Layer(
            "flax.nnx.Dropout", "deterministic", False, _DROPS, _EVAL, "rate"
        ),
        ("flax.linen.normalization", "BatchNorm.__call__"): Layer(
            "flax.linen.BatchNorm", "use_running_average", False, _STATISTICS, _LINEN
        ),
        ("flax.linen.stochastic", "Dropout.__call__"): Layer(
            "flax.linen.Dropout", "deterministic", False, _DROPS, _LINEN, "rate"
        ),
        ("equinox.nn._batch_norm", "BatchNorm.__call__"): Layer(
            "equinox.nn.BatchNorm", "inference", False, _STATISTICS, _EQUINOX
        ),
        ("equinox.nn._dropout", "Dropout.__call__"): Layer(
            "equinox.nn.Dropout", "inference", False, _DROPS, _EQUINOX, "p"
        ),
        ("haiku._src.batch_norm", "BatchNorm.__call__"): Layer(
            "haiku.BatchNorm", "is_training", True, _STATISTICS, _HAIKU
        ),
        ("keras.src.layers.normalization.batch_normalization", "BatchNormalization.call"): Layer(
            "keras.layers.BatchNormalization", "training", True, _STATISTICS, _KERAS
        ),
        ("keras.src.layers.regularization.dropout", "Dropout.call"): Layer(
            "keras.layers.Dropout", "training", True, _DROPS, _KERAS, "rate"
        ),
    }
)
"""Layers that behave differently in training, by module and qualified name of their `__call__`."""

_REDUCE = "stablehlo.reduce"
_BERNOULLI = "_bernoulli"
"""Symbol of the function that `jax.random.bernoulli` is lowered to."""
_DRAWS = re.compile(rf"{_BERNOULLI}(_\d+)?")
"""The same symbol, with a suffix for further shapes or keys."""
_LOOKS = "it looks like training mode"
_DRAWN = (
    f"{_LOOKS}: jax.random.bernoulli draws the same numbers in every request, as dropout does; "
    "export it again in inference mode, or with a seed among its inputs"
)


def training_layer(module: bytes) -> Layer | None:
    """Return the first layer traced in training mode, found by the module's source locations.

    In inference, dropout emits no operations, and batch normalization no reductions.
    """
    names = names_in(module)
    named = {
        layer: (_file(place), name)
        for (place, name), layer in LAYERS.items()
        if _file(place).encode() in names and name.encode() in names
    }
    if not named:
        return None
    with parsed(module) as whole:
        for location in _locations(whole.operation, reduces=all(map(_normalises, named))):
            for layer, (file, name) in named.items():
                if _normalises(layer) and not location.startswith(_REDUCE):
                    continue
                if re.search(rf'"{re.escape(name)}"\("[^"]*{re.escape(file)}"', location):
                    return layer
    return None


def said_of_module(module: bytes, *, takes_integers: bool) -> str:
    """Return why a module seems to be in training mode, and what to do; else an empty string.

    With `takes_integers`, random draws are accepted: an input may be their seed.
    """
    layer = training_layer(module)
    if layer is not None:
        return f"{_LOOKS}: {layer.name} {layer.does}; export it again: {layer.advice}"
    return _DRAWN if not takes_integers and _draws(module) else ""


def _draws(module: bytes) -> bool:
    """Tell whether a module calls `jax.random.bernoulli`, not just a similar name."""
    if _BERNOULLI.encode() not in names_in(module):
        return False
    with parsed(module) as whole:
        return any(
            _DRAWS.fullmatch(ir.StringAttr(one.operation.attributes["sym_name"]).value)
            for one in whole.body.operations
            if "sym_name" in one.operation.attributes
        )


def _normalises(layer: Layer) -> bool:
    return layer.does is _STATISTICS


def _file(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _locations(operation: Any, *, reduces: bool) -> Iterator[str]:
    """Yield names and locations of all nested operations; with `reduces`, only of reductions."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                found = inner.operation
                if not reduces or found.name == _REDUCE:
                    yield f"{found.name} {found.location}"
                yield from _locations(found, reduces=reduces)
