"""Writes a stepped JAX function as a version directory: a model with many answers to a request.

def begin(params, prompt):
    return {"token": prompt[-1], "cache": params["embedding"][prompt]}

def step(params, state, prompt):
    logits, cache = forward(params, state["token"], state["cache"])
    token = logits.argmax()
    return {"token": token, "cache": cache}, {"token": token}, token == END

export_stream(step, params, {"prompt": ("INT32", [16])}, "models/writer/1", begin=begin)
"""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from xlaserve.errors import InvalidModel
from xlaserve.models import artifact
from xlaserve.models.export import Exportable, Inputs, input_specs
from xlaserve.models.lowering import is_wide, named
from xlaserve.models.steps import DONE, FIRST, RESERVED, Steps, state_name
from xlaserve.tensors import TensorSpec, datatype_named

DEFAULT_MAX_STEPS = 1 << 16
_RESULTS = 3

Begin: TypeAlias = Callable[..., object]
"""Called as `begin(params, *inputs)`; returns the state, any pytree of arrays."""
Step: TypeAlias = Callable[..., tuple[object, object, object]]
"""Called as `step(params, state, *inputs)`; returns the next state, like the one before in shapes
and dtypes, the outputs of one answer, and whether it is the last one, a boolean."""


@dataclass(frozen=True, slots=True)
class ExportableStream:
    """A stepped model that is ready to be exported, as `xlaserve export FILE.py:NAME` looks for it.

    Its state stays on the device between steps. It begins anew with each request.
    """

    step: Step
    params: object
    """Any pytree, as that of an Exportable."""
    inputs: Inputs
    """Name, datatype and shape of each input; all sizes are fixed."""
    begin: Begin
    outputs: Sequence[str] | None = None
    """The names of the outputs of a step; None where it returns them as a dict."""
    max_steps: int = DEFAULT_MAX_STEPS
    """The most answers to one request: a model that is not done then fails. A configuration may
    say less, by its parameter `max_steps`."""
    platforms: Sequence[str] | None = None
    x64: bool | None = None

    def write(
        self,
        path: Path | str,
        *,
        exported_at: datetime | None = None,
        overwrite: bool = False,
        on_notice: Callable[[str], None] | None = None,
    ) -> Path:
        """Export to the version directory `<model>/<version>` and return it, as Exportable does."""
        if self.max_steps < 1:
            raise InvalidModel(f"max_steps: expected 1 or more, got {self.max_steps}")
        specs = input_specs(self.inputs)
        for spec in specs:
            if -1 in spec.shape:
                raise InvalidModel(
                    f"input '{spec.name}' is {spec}, but a stepped model takes one request at a "
                    "time, and all sizes are fixed"
                )
        _check_names("input", [spec.name for spec in specs])
        wide = is_wide(self.params, specs, self.x64)
        with jax.enable_x64(wide):
            stepped = _Stepped(self, specs)
        model = Exportable(
            stepped,
            self.params,
            (*specs, TensorSpec(FIRST, datatype_named("BOOL"), ()), *stepped.state),
            max_batch_size=0,
            platforms=self.platforms,
            x64=wide,
        )
        return model.write(
            path,
            exported_at=exported_at,
            overwrite=overwrite,
            on_notice=on_notice,
            steps=Steps(len(stepped.state), self.max_steps),
        )


def export_stream(
    step: Step,
    params: object,
    inputs: Inputs,
    path: Path | str,
    *,
    begin: Begin,
    outputs: Sequence[str] | None = None,
    max_steps: int = DEFAULT_MAX_STEPS,
    platforms: Sequence[str] | None = None,
    x64: bool | None = None,
    exported_at: datetime | None = None,
    overwrite: bool = False,
) -> Path:
    """Export a stepped function to a version directory; see ExportableStream."""
    model = ExportableStream(
        step,
        params,
        inputs,
        begin,
        outputs=outputs,
        max_steps=max_steps,
        platforms=platforms,
        x64=x64,
    )
    return model.write(path, exported_at=exported_at, overwrite=overwrite)


class _Stepped:
    """`begin` and `step` as one function: `(params, *inputs, is_first, *state) -> outputs`."""

    def __init__(self, model: ExportableStream, inputs: Sequence[TensorSpec]) -> None:
        self._model = model
        self._count = len(inputs)
        arguments = [jax.ShapeDtypeStruct(spec.shape, spec.datatype.dtype) for spec in inputs]
        self._tree: Any = None
        self._keys: list[Any] = []
        """The kind of each leaf of the state that is a key of random numbers, None of others."""
        try:
            leaves = jax.eval_shape(self._traced, *arguments)
        except Exception as error:
            raise InvalidModel(f"begin cannot be traced: {error}") from error
        if not leaves:
            raise InvalidModel("begin: expected a state with at least one array, got none")
        names = [state_name(index) for index in range(len(leaves))]
        self.state = artifact.specs_of("state", names, leaves, None)

    def __call__(self, params: object, *tensors: jax.Array) -> dict[str, object]:
        inputs, first, leaves = (
            tensors[: self._count],
            tensors[self._count],
            tensors[self._count + 1 :],
        )
        leaves = jax.lax.cond(
            first, lambda: tuple(self._begin(params, *inputs)), lambda: tuple(leaves)
        )
        state = jax.tree.unflatten(
            self._tree,
            [
                leaf if key is None else jax.random.wrap_key_data(leaf, impl=key)
                for leaf, key in zip(leaves, self._keys, strict=True)
            ],
        )
        result: object = self._model.step(params, state, *inputs)
        if not isinstance(result, tuple) or len(result) != _RESULTS:
            raise InvalidModel(
                f"step: expected a tuple (state, outputs, done), got {type(result).__name__}"
            )
        state, outputs, done = result
        found = named(outputs, self._model.outputs)
        _check_names("output", list(found))
        following = self._leaves(state)
        states = {spec.name: leaf for spec, leaf in zip(self.state, following, strict=True)}
        return {**found, DONE: _done(done), **states}

    def _traced(self, *arguments: jax.Array) -> list[jax.Array]:
        """Return the state that a request begins with; what it is made of is known then."""
        leaves, self._tree = jax.tree.flatten(self._model.begin(self._model.params, *arguments))
        self._keys = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves]
        return _flat(leaves)

    def _begin(self, params: object, *inputs: jax.Array) -> list[jax.Array]:
        return _flat(self._model.begin(params, *inputs))

    def _leaves(self, state: object) -> list[jax.Array]:
        tree = jax.tree.structure(state)
        if tree != self._tree:
            raise InvalidModel(f"step: expected the state of begin, {self._tree}, got {tree}")
        leaves = _flat(state)
        for spec, leaf in zip(self.state, leaves, strict=True):
            if (leaf.shape, leaf.dtype) != (spec.shape, spec.datatype.dtype):
                raise InvalidModel(
                    f"step: expected '{spec.name}' as begin gives it, {spec}, got "
                    f"{leaf.dtype.name}{list(leaf.shape)}"
                )
        return leaves


def _flat(state: object) -> list[jax.Array]:
    leaves = jax.tree.leaves(state)
    return [jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf) for leaf in leaves]


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _done(done: Any) -> jax.Array:
    found = jnp.asarray(done)
    if found.dtype != jnp.bool_ or found.shape:
        raise InvalidModel(
            f"step: expected done as bool[], got {found.dtype.name}{list(found.shape)}"
        )
    return found


def _check_names(kind: str, names: Sequence[str]) -> None:
    for name in names:
        if name.startswith(RESERVED):
            raise InvalidModel(f"{kind} '{name}': names that start with '{RESERVED}' are reserved")
