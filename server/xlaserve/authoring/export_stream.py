"""Exports a stepped JAX function to a version directory, as a decoupled model.

def begin(params, prompt):
    return {"token": prompt[-1], "cache": params["embedding"][prompt]}

def step(params, state, prompt):
    logits, cache = forward(params, state["token"], state["cache"])
    token = logits.argmax()
    return {"token": token, "cache": cache}, {"token": token}, token == END

export_stream(step, params, {"prompt": ("INT32", [16])}, "models/writer/1", begin=begin)
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from xlaserve.artifact import artifact, manifest
from xlaserve.artifact.steps import DONE, FIRST, RESERVED, Steps, state_name
from xlaserve.authoring.declared import Inputs, input_specs
from xlaserve.authoring.export import Exportable
from xlaserve.authoring.lowering import is_wide, named
from xlaserve.errors import InvalidModel
from xlaserve.model_config.buckets import MAX_BATCH_SIZE
from xlaserve.tensors import TensorSpec, datatype_named

DEFAULT_MAX_STEPS = 1 << 16
_RESULTS = 3

Begin: TypeAlias = Callable[..., object]
"""Called as `begin(params, *inputs)`; returns the initial state, any pytree of arrays."""
Step: TypeAlias = Callable[..., tuple[object, object, object]]
"""Called as `step(params, state, *inputs)`; returns the next state (same shapes and dtypes), the
outputs of one answer, and a boolean: whether it is the last answer."""


@dataclass(frozen=True, slots=True)
class ExportableStream:
    """A stepped model ready to be exported; `xlaserve export FILE.py:NAME` looks for one.

    Its state stays on the device between steps, and is initialized for each request. `step`,
    `params`, `inputs`, `begin`, `outputs`, `max_steps`, `platforms`, `x64` and `max_batch_size`
    are arguments of `export_stream`.
    """

    step: Step
    params: object
    """Any pytree, as for an Exportable."""
    inputs: Inputs
    """Name, datatype and shape of each input; all sizes are fixed."""
    begin: Begin
    outputs: Sequence[str] | None = None
    """Names of a step's outputs; None if it returns a dict."""
    max_steps: int = DEFAULT_MAX_STEPS
    """Maximum number of answers per request; a model that has not finished by then fails. The
    parameter `max_steps` of a model configuration can lower it."""
    platforms: Sequence[str] | None = None
    x64: bool | None = None
    max_batch_size: int = 0
    """Maximum number of requests per batched step; 0 steps each request separately. `begin` and
    `step` remain functions of one request: `jax.vmap` batches them. If row independence cannot be
    proved, each request is stepped separately, and a notice says so."""

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
        if not 0 <= self.max_batch_size <= MAX_BATCH_SIZE:
            raise InvalidModel(
                f"max_batch_size: expected 0 to {MAX_BATCH_SIZE}, got {self.max_batch_size}"
            )
        specs = input_specs(self.inputs)
        for spec in specs:
            if -1 in spec.shape:
                raise InvalidModel(
                    f"input '{spec.name}' is {spec}, but a stepped model executes one request at"
                    " a time and needs fixed sizes"
                )
        _check_names("input", [spec.name for spec in specs])
        wide = is_wide(self.params, specs, self.x64)
        with jax.enable_x64(wide):
            stepped = _Stepped(self, specs)
        tensors = (*specs, TensorSpec(FIRST, datatype_named("BOOL"), ()), *stepped.state)
        alone = Exportable(
            stepped, self.params, tensors, max_batch_size=0, platforms=self.platforms, x64=wide
        )
        batched = replace(
            alone,
            fn=stepped.batched,
            inputs=[TensorSpec(s.name, s.datatype, (-1, *s.shape)) for s in tensors],
            max_batch_size=self.max_batch_size,
        )
        write = partial(
            Exportable.write,
            path=path,
            exported_at=exported_at,
            on_notice=on_notice,
            steps=Steps(len(stepped.state), self.max_steps),
        )
        if not self.max_batch_size:
            return write(alone, overwrite=overwrite)
        made = write(batched, overwrite=overwrite)
        # Without proof of independent rows, the batched artifact would run one row at a time. Then
        # the unbatched one is better: it keeps the state on the device.
        return made if manifest.read(made).max_batch_size else write(alone, overwrite=True)


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
    max_batch_size: int = 0,
    exported_at: datetime | None = None,
    overwrite: bool = False,
) -> Path:
    """Export a stepped function, which gives several answers per request, and return the path.

    `step` is called as `step(params, state, *inputs)` for each answer, and returns the next state,
    the outputs, and a boolean: whether they are the last ones.

    `params` is any pytree; its arrays are stored in the weights file.

    `inputs` has the name, datatype and shape of each input; all sizes are fixed.

    `path` is the version directory, REPOSITORY/MODEL/VERSION.

    `begin` is called as `begin(params, *inputs)` for each request, and returns the initial state,
    any pytree of arrays.

    `outputs` has the names of a step's outputs; None if it returns them as a dict.

    `max_steps` is the maximum number of answers per request. `platforms` and `x64` are as in
    `export_model`.

    `max_batch_size` is the maximum number of requests per batched step; 0 steps each separately.

    `exported_at` is the recorded time of the export; `overwrite` replaces an existing version.

    Raises InvalidModel, or FileExistsError if the version exists.
    """
    model = ExportableStream(
        step,
        params,
        inputs,
        begin,
        outputs=outputs,
        max_steps=max_steps,
        platforms=platforms,
        x64=x64,
        max_batch_size=max_batch_size,
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
        """PRNG implementation of each random key in the state; None for leaves that are not
        keys."""
        try:
            leaves = jax.eval_shape(self._traced, *arguments)
        except Exception as error:
            raise InvalidModel(f"begin cannot be traced: {error}") from error
        if not leaves:
            raise InvalidModel("begin: expected a state with at least one array, got none")
        names = [state_name(index) for index in range(len(leaves))]
        self.state = artifact.specs_of("state", names, leaves, None)

    def __call__(self, params: object, *tensors: jax.Array) -> dict[str, object]:
        inputs, first, leaves = self._parts(tensors)
        leaves = jax.lax.cond(
            first, lambda: tuple(self._begin(params, *inputs)), lambda: tuple(leaves)
        )
        return self._step(params, inputs, leaves)

    def batched(self, params: object, *tensors: jax.Array) -> dict[str, object]:
        """Compute one step for each row of a batch.

        `begin` is skipped if no row is at its first step. A plain `vmap` would compute it in every
        step.
        """
        inputs, first, leaves = self._parts(tensors)

        def begun() -> tuple[jax.Array, ...]:
            found = jax.vmap(lambda row: tuple(self._begin(params, *row)))(inputs)
            masks = [first.reshape(-1, *[1] * (leaf.ndim - 1)) for leaf in leaves]
            return tuple(map(jnp.where, masks, found, leaves))

        leaves = jax.lax.cond(jnp.any(first), begun, lambda: leaves)
        names: list[str] = []

        def step(row: tuple[jax.Array, ...], state: tuple[jax.Array, ...]) -> list[object]:
            found = self._step(params, row, state)
            names[:] = found  # `vmap` does not preserve the order of a dict
            return list(found.values())

        return dict(zip(names, jax.vmap(step)(inputs, leaves), strict=True))

    def _parts(
        self, tensors: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, ...], jax.Array, tuple[jax.Array, ...]]:
        """Split the arguments into clients' inputs, the first-step flag and the state."""
        count = self._count
        return tensors[:count], tensors[count], tensors[count + 1 :]

    def _step(
        self, params: object, inputs: Sequence[jax.Array], leaves: Sequence[jax.Array]
    ) -> dict[str, object]:
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
        """Return the leaves of the initial state, and record its tree structure."""
        leaves, self._tree = jax.tree.flatten(self._model.begin(self._model.params, *arguments))
        self._keys = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves]
        return _flat(leaves)

    def _begin(self, params: object, *inputs: jax.Array) -> list[jax.Array]:
        return _flat(self._model.begin(params, *inputs))

    def _leaves(self, state: object) -> list[jax.Array]:
        tree = jax.tree.structure(state)
        if tree != self._tree:
            raise InvalidModel(
                "step: expected a state with the tree that begin returned,"
                f" {self._tree}, got {tree}"
            )
        leaves = _flat(state)
        for spec, leaf in zip(self.state, leaves, strict=True):
            if (leaf.shape, leaf.dtype) != (spec.shape, spec.datatype.dtype):
                raise InvalidModel(
                    f"step: expected '{spec.name}' as begin returned it, {spec}, got "
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
