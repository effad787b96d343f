"""Recurrent layers (LSTM, GRU, RNN) as scans over time."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.quantisation import dynamic_levels
from xlaserve.importers.onnx.operators.table import Family, Operation, operator
from xlaserve.importers.onnx.values import Value, on_device

Activation: TypeAlias = Callable[[jax.Array], jax.Array]
States: TypeAlias = tuple[jax.Array, ...]

_ACTIVATIONS: MappingProxyType[str, Activation] = MappingProxyType(
    {
        "Relu": jax.nn.relu,
        "Sigmoid": jax.nn.sigmoid,
        "Softplus": jax.nn.softplus,
        "Tanh": jnp.tanh,
    }
)
"""Activations without parameters."""

_LSTM_GATES = 4
_LSTM_ACTIVATIONS = ("Sigmoid", "Tanh", "Tanh")

_LSTM_GATES = 4
_LSTM_ACTIVATIONS = ("Sigmoid", "Tanh", "Tanh")

_DIRECTIONS: MappingProxyType[str, tuple[bool, ...]] = MappingProxyType(
    {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
)
"""Whether each direction runs backwards, by the attribute `direction`."""


@dataclass(frozen=True, slots=True)
class _Weights:
    inputs: jax.Array
    """Input weights [gates * hidden, input]."""
    recurrent: jax.Array
    """Recurrent weights [gates * hidden, hidden]."""
    input_bias: jax.Array
    recurrent_bias: jax.Array
    peepholes: tuple[jax.Array, ...]
    """Peepholes of an LSTM's input, output and forget gates, if any."""
    activations: tuple[Activation, ...]
    linear_before_reset: bool
    scales: tuple[jax.Array | None, jax.Array | None] = (None, None)
    """Scales of the input and recurrent weights if the weights are quantised to 8 bits; activations
    are then quantised dynamically."""


_Step: TypeAlias = Callable[[_Weights, States, jax.Array], States]
"""Computes the next states from the weights, the states, and one time step's gate inputs."""


def _plain_step(weights: _Weights, states: States, x: jax.Array) -> States:
    (hidden,) = states
    (f,) = weights.activations
    return (f(x + hidden @ weights.recurrent.T + weights.recurrent_bias),)


def _gru_step(weights: _Weights, states: States, x: jax.Array) -> States:
    (hidden,) = states
    f, g = weights.activations
    size = hidden.shape[-1]
    update_reset, new = weights.recurrent[: 2 * size], weights.recurrent[2 * size :]
    bias = weights.recurrent_bias
    gates = f(x[..., : 2 * size] + hidden @ update_reset.T + bias[..., : 2 * size])
    update, reset = jnp.split(gates, 2, axis=-1)
    if weights.linear_before_reset:
        recurrent = reset * (hidden @ new.T + bias[..., 2 * size :])
    else:
        recurrent = (reset * hidden) @ new.T + bias[..., 2 * size :]
    candidate = g(x[..., 2 * size :] + recurrent)
    return ((1 - update) * candidate + update * hidden,)


def _lstm_step(weights: _Weights, states: States, x: jax.Array) -> States:
    hidden, cell = states
    f, g, h = weights.activations
    recurrent = _product(hidden, weights.recurrent, weights.scales[1])
    gates = x + recurrent + weights.recurrent_bias
    i, o, forget, c = jnp.split(gates, 4, axis=-1)
    if weights.peepholes:
        i, forget = i + weights.peepholes[0] * cell, forget + weights.peepholes[2] * cell
    cell = f(forget) * cell + f(i) * g(c)
    if weights.peepholes:
        o = o + weights.peepholes[1] * cell
    return f(o) * h(cell), cell


def _product(x: jax.Array, weights: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Return x @ weights.T; with a scale, the weights are quantised, and x is quantised first."""
    if scale is None:
        return x @ weights.T
    level, step, zero = dynamic_levels(x)
    centred = level.astype(x.dtype) - zero.astype(x.dtype)
    steps = (step * scale).reshape((1,) * (x.ndim - 1) + (-1,))
    return (centred @ weights.T) * steps


def recurrent(step: _Step, gates: int, states: int, activations: Sequence[str]) -> Operation:
    """Return the operation for a layer type with this many gates and states."""

    def compute(
        node: Node,
        x: Value,
        w: Value,
        r: Value,
        b: Value | None = None,
        lengths: Value | None = None,
        *rest: Value | None,
    ) -> tuple[Value, ...]:
        if lengths is not None:
            raise InvalidModel("sequence_lens is not implemented")
        _check_attributes(node, gates)
        backwards = _DIRECTIONS[node.text("direction", "forward")]
        functions = _functions(node, activations, len(backwards))
        before_reset = bool(node.integer("linear_before_reset", 0))
        initial = [*rest, *[None] * 3]
        weights = [
            _weights(index, w, r, b, initial[states], functions[index], before_reset)
            for index in range(len(backwards))
        ]
        return _layer(node, step, x, weights, initial[:states])

    return compute


def _layer(
    node: Node, step: _Step, x: Value, weights: Sequence[_Weights], initial: Sequence[Value | None]
) -> tuple[Value, ...]:
    """Run each direction of a layer."""
    backwards = _DIRECTIONS[node.text("direction", "forward")]
    layout = node.integer("layout", 0)
    array = jnp.swapaxes(on_device(x), 0, 1) if layout else on_device(x)
    runs = [
        _run(
            step,
            weights[index],
            _initial(index, initial, array, node, layout),
            array,
            backward=backward,
        )
        for index, backward in enumerate(backwards)
    ]
    return _outputs(runs, layout)[: len(node.outputs)]


def _quantised_lstm(
    node: Node,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None,
    lengths: Value | None,
    hidden: Value | None,
    cell: Value | None,
    peepholes: Value | None,
    w_scale: Value,
    w_zero: Value,
    r_scale: Value,
    r_zero: Value,
) -> tuple[Value, ...]:
    """Run an LSTM with 8-bit weights [direction, input, gates * hidden]."""
    if lengths is not None:
        raise InvalidModel("sequence_lens is not implemented")
    _check_attributes(node, _LSTM_GATES)
    count = len(_DIRECTIONS[node.text("direction", "forward")])
    functions = _functions(node, _LSTM_ACTIVATIONS, count)
    dtype = on_device(x).dtype
    inputs, states = _centred(w, w_zero, dtype), _centred(r, r_zero, dtype)
    weights = [
        replace(
            _weights(index, inputs, states, b, peepholes, functions[index], False),
            scales=(on_device(w_scale)[index], on_device(r_scale)[index]),
        )
        for index in range(count)
    ]
    return _layer(node, _lstm_step, x, weights, (hidden, cell))


def _centred(levels: Value, zero: Value, dtype: "np.dtype[Any]") -> jax.Array:
    """Subtract zero points (per direction or column) and transpose to the layout of an LSTM."""
    array, point = on_device(levels).astype(dtype), on_device(zero).astype(dtype)
    return jnp.swapaxes(array - point.reshape(len(array), 1, -1), 1, 2)


def _check_attributes(node: Node, gates: int) -> None:
    if node.integer("input_forget", 0) or node.has("clip"):
        raise InvalidModel("input_forget and clip are not implemented")
    if node.has("activation_alpha") or node.has("activation_beta"):
        raise InvalidModel("activations with parameters are not implemented")
    node.integer("hidden_size", gates)


def _functions(
    node: Node, defaults: Sequence[str], directions: int
) -> list[tuple[Activation, ...]]:
    names = node.texts("activations") or tuple(defaults) * directions
    unknown = [name for name in names if name not in _ACTIVATIONS]
    if unknown or len(names) != len(defaults) * directions:
        raise InvalidModel(
            f"activations: expected {len(defaults) * directions} of"
            f" {', '.join(_ACTIVATIONS)}, got {names}"
        )
    found = [_ACTIVATIONS[name] for name in names]
    count = len(defaults)
    return [tuple(found[index * count : (index + 1) * count]) for index in range(directions)]


def _weights(
    index: int,
    w: Value,
    r: Value,
    b: Value | None,
    p: Value | None,
    activations: tuple[Activation, ...],
    linear_before_reset: bool,
) -> _Weights:
    inputs, hidden = on_device(w)[index], on_device(r)[index]
    bias = jnp.zeros(2 * len(inputs), inputs.dtype) if b is None else on_device(b)[index]
    first, second = jnp.split(bias, 2)
    peepholes = () if p is None else tuple(jnp.split(on_device(p)[index][None, :], 3, axis=1))
    return _Weights(
        inputs, hidden, first[None, :], second[None, :], peepholes, activations, linear_before_reset
    )


def _initial(
    index: int, given: Sequence[Value | None], x: jax.Array, node: Node, layout: int
) -> States:
    zeros = jnp.zeros((x.shape[1], node.integer("hidden_size")), x.dtype)
    return tuple(
        zeros
        if state is None
        else (on_device(state)[:, index] if layout else on_device(state)[index])
        for state in given
    )


def _run(
    step: _Step, weights: _Weights, first: States, x: jax.Array, *, backward: bool
) -> tuple[jax.Array, States]:
    """Return the hidden states of all time steps, and the final states."""
    gates = _product(x, weights.inputs, weights.scales[0]) + weights.input_bias[None, :, :]

    def body(states: States, gate: jax.Array) -> tuple[States, jax.Array]:
        following = step(weights, states, gate)
        return following, following[0]

    last, hidden = jax.lax.scan(body, first, gates, reverse=backward)
    return hidden, last


def _outputs(runs: Sequence[tuple[jax.Array, States]], layout: int) -> tuple[Value, ...]:
    every = jnp.stack([hidden for hidden, _ in runs], axis=1)
    last = [
        jnp.stack(states, axis=1 if layout else 0)
        for states in zip(*(states for _, states in runs), strict=True)
    ]
    return (jnp.moveaxis(every, 2, 0) if layout else every, *last)


RECURRENT: Family = {
    "GRU": operator(recurrent(_gru_step, 3, 1, ("Sigmoid", "Tanh"))),
    "LSTM": operator(recurrent(_lstm_step, _LSTM_GATES, 2, _LSTM_ACTIVATIONS)),
    "RNN": operator(recurrent(_plain_step, 1, 1, ("Tanh",))),
}

MICROSOFT_RECURRENT: Family = {"DynamicQuantizeLSTM": operator(_quantised_lstm)}
