"""Rewrites a JAX function so that its convolutions are faster on the CPU."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from xlaserve.authoring.cpu.channels_last import Given, Last, convolved, plain, ruled
from xlaserve.authoring.cpu.convolutions import Convolution, convolve
from xlaserve.errors import InvalidModel


def optimize(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return an equivalent function whose convolutions are faster on the CPU.

    Only the CPU gets the rewritten program; other platforms compile the original one. Images
    [N,C,...] are kept channels-last between convolutions, swish is computed as a quotient of
    polynomials, and grouped, depthwise, pointwise and large convolutions are rewritten by
    `convolve` of xlaserve.authoring.cpu.convolutions.

    Convolutions are also found inside jitted functions, branches, loops and custom derivatives.
    Functions with custom derivatives are inlined, so differentiate before optimizing. Convolutions
    in other transformations, such as `shard_map`, and those with a `batch_group_count`, are left
    unchanged.

    Arguments are pytrees of arrays. Raises InvalidModel if `fn` is not callable, and TypeError, as
    JAX does, for arguments that are not arrays.
    """
    if not callable(fn):
        raise InvalidModel(f"optimize: expected a function, got a {type(fn).__name__}")

    @wraps(fn)
    def optimized(*args: Any, **kwargs: Any) -> Any:
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        written = core.jaxpr_as_fun(closed)  # calling `fn` would trace it again
        leaves = jax.tree.leaves((args, kwargs))
        if _is_rewritten(closed.jaxpr):
            quick = partial(_rewrite, closed)
            results = lax.platform_dependent(*leaves, cpu=quick, default=written)
        else:
            results = written(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return optimized


def _is_rewritten(jaxpr: core.Jaxpr) -> bool:
    """Tell whether a jaxpr contains a convolution that can be rewritten."""
    return any(
        _is_candidate(equation) or any(map(_is_rewritten, _inner(equation).values()))
        for equation in jaxpr.eqns
    )


def _is_candidate(equation: core.JaxprEqn) -> bool:
    return (
        equation.primitive is primitives.conv_general_dilated_p
        and equation.params["batch_group_count"] == 1
    )


def _inner(equation: core.JaxprEqn) -> dict[tuple[str, int], Any]:
    """Return an equation's inner functions by parameter name and index."""
    found: dict[tuple[str, int], Any] = {}
    for name in _FUNCTIONS.get(equation.primitive, ()):
        value = equation.params.get(name)
        for place, each in enumerate(value if isinstance(value, tuple | list) else [value]):
            if hasattr(each, "eqns"):
                found[name, place] = getattr(each, "jaxpr", each)
    return found


_INLINED = frozenset(
    {
        # Their derivative rules belong to the original function.
        primitives.custom_jvp_call_p,
        primitives.custom_vjp_call_p,
        # Inlined so that images stay channels-last across the call.
        primitives.jit_p,
        primitives.remat_p,
    }
)
"""Calls that are inlined."""

_FUNCTIONS: dict[core.Primitive, tuple[str, ...]] = {
    primitives.jit_p: ("jaxpr",),
    primitives.remat_p: ("jaxpr",),
    primitives.cond_p: ("branches",),
    primitives.while_p: ("cond_jaxpr", "body_jaxpr"),
    primitives.scan_p: ("jaxpr",),
    primitives.custom_jvp_call_p: ("call_jaxpr",),
    primitives.custom_vjp_call_p: ("call_jaxpr",),
}
"""Parameters of each primitive that contain functions to rewrite."""


def _rewrite(closed: Any, *arguments: jax.Array) -> list[jax.Array]:
    """Evaluate a jaxpr with rewritten convolutions."""
    return [plain(each) for each in _evaluate(closed, *arguments)]


def _evaluate(closed: Any, *arguments: Given) -> list[Given]:
    jaxpr = getattr(closed, "jaxpr", closed)
    values: dict[Any, Any] = {}
    values.update(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        values.update(zip(equation.outvars, _computed(equation, given), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _computed(equation: core.JaxprEqn, given: Sequence[Given]) -> list[Given]:
    parameters = equation.params
    if _is_candidate(equation):
        return [_convolved(parameters, *given)]
    found = ruled(equation, given)
    if found is not None:
        return found
    is_rewritten = any(map(_is_rewritten, _inner(equation).values()))
    if equation.primitive in _INLINED and (
        is_rewritten or any(isinstance(each, Last) for each in given)
    ):
        return _evaluate(parameters[_FUNCTIONS[equation.primitive][0]], *given)
    if is_rewritten:
        parameters = dict(parameters)
        for name in _FUNCTIONS[equation.primitive]:
            parameters[name] = _rewritten(parameters[name])
    bound = equation.primitive.get_bind_params(parameters)
    with equation.ctx.manager:  # settings made in `fn`, such as 64-bit types
        results = equation.primitive.bind(*map(plain, given), **bound)
    return list(results) if equation.primitive.multiple_results else [results]


def _rewritten(function: Any) -> Any:
    """Return jaxprs with rewritten convolutions."""
    if isinstance(function, tuple | list):
        return type(function)(_rewritten(each) for each in function)
    jaxpr = getattr(function, "jaxpr", function)
    if not _is_rewritten(jaxpr):
        return function
    arguments = [
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=var.aval.weak_type)
        for var in jaxpr.invars
    ]
    made = jax.make_jaxpr(partial(_rewrite, function))(*arguments)
    if hasattr(function, "consts"):
        return made
    # An open jaxpr cannot hold constants, so keep the original.
    return function if made.consts else made.jaxpr


def _convolved(parameters: Any, image: Given, kernel: Given) -> Given:
    convolution = Convolution(
        parameters["window_strides"],
        parameters["padding"],
        parameters["lhs_dilation"],
        parameters["rhs_dilation"],
        parameters["dimension_numbers"],
        parameters["feature_group_count"],
        parameters["precision"],
        parameters["preferred_element_type"],
    )
    found = convolved(convolution, image, plain(kernel))
    return convolve(convolution, plain(image), plain(kernel)) if found is None else found
