"""Produces the computation compiled for one batch size: static shapes, inlined functions.

It uses the same passes as JAX before XLA compiles, so that the proof is about the served
computation.
"""

# Some JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import jax
from jax.export import Exported
from jax.extend import mlir as extended
from jax.extend.mlir import ir
from jax.interpreters import mlir

from xlaserve.row_proofs.findings import Unfollowed


class Refinery:
    """Produces the modules of an artifact by batch size and platform."""

    def __init__(
        self, exported: Exported, sizes: Mapping[str, int], batch: str, *, any_size: int = 0
    ) -> None:
        self._exported = exported
        self._sizes = sizes
        self._batch = batch
        self._any_size = any_size
        """Size of dimensions for which none is given; 0 makes them an error."""
        self._traced: dict[int, Any] = {}
        self._opened: dict[tuple[int, str], Any] = {}
        self._refined: dict[Any, bytes] = {}

    def open_module(self, rows: int, platform: str) -> Any:
        """Return the module for a batch size, with inner shapes still dynamic."""
        if (rows, platform) not in self._opened:
            self._opened[rows, platform] = self._lowered(rows, platform)
        return self._opened[rows, platform]

    def _lowered(self, rows: int, platform: str) -> Any:
        if rows not in self._traced:
            function = jax.jit(self._exported.call, keep_unused=True)
            leaves = [
                jax.ShapeDtypeStruct(self._shape(aval.shape, rows), aval.dtype)
                for aval in self._exported.in_avals
            ]
            positional, named = jax.tree.unflatten(self._exported.in_tree, leaves)
            self._traced[rows] = function.trace(*positional, **named)
        lowered = self._traced[rows].lower(lowering_platforms=(platform,))
        return lowered.compiler_ir("stablehlo")

    def refined(self, module: Any) -> bytes:
        """Return the serialized module with static shapes; cached."""
        if module not in self._refined:
            self._refined[module] = self.with_sizes(module)
        return self._refined[module]

    @staticmethod
    def with_sizes(module: Any) -> bytes:
        """Make all shapes of a module static, and return it serialized."""
        found = extended.refine_polymorphic_shapes(
            mlir_module=mlir.module_to_bytecode(module),
            enable_shape_assertions=True,
            validate_static_shapes=True,
            enable_shardy=bool(cast("Any", jax.config).jax_use_shardy_partitioner),
        )
        return bytes(found)

    def _shape(self, shape: Sequence[object], rows: int) -> tuple[int, ...]:
        return tuple(
            size if isinstance(size, int) else self._size(str(size), rows) for size in shape
        )

    def _size(self, name: str, rows: int) -> int:
        if name == self._batch:
            return rows
        size = self._sizes.get(name, self._any_size)
        if not size:
            raise Unfollowed(f"has a dimension '{name}' for which no size is given")
        return size


@contextmanager
def parsing() -> Iterator[Any]:
    """Provide the MLIR context that `parse` needs, within a block."""
    context = mlir.make_ir_context()
    with context:
        yield context


def parse(module: bytes | str) -> Any:
    """Parse a module, within `parsing`."""
    return ir.Module.parse(module)
