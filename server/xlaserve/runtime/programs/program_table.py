"""The executables of a model at one site, by bucket, with their measured times."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TypeAlias

import jax
import numpy as np

from xlaserve.artifact.shapes import Sizes
from xlaserve.artifact.target_sizes import IN_FLIGHT
from xlaserve.model_config.buckets import FIXED
from xlaserve.runtime.devices.device_parameters import DeviceParameters
from xlaserve.runtime.devices.sites import Layout, Site
from xlaserve.runtime.loaded import Bucket
from xlaserve.runtime.programs.footprint import Footprint
from xlaserve.tensors import Tensor, TensorSpec

_WORTH_WHILE = 0.95
"""A larger batch is worth waiting for if its time per row is at most this fraction of the smaller
one's.
"""

_WORTH_SPLITTING = 0.6
"""A batch is executed in pieces if they take at most this fraction of its time. Measurements on a
busy machine vary by a third.
"""

_LEAST_SPLIT_SECONDS = 1e-3
"""Faster batches are executed whole: splitting would gain less than the error of a disturbed
measurement.
"""

_PIECE_SECONDS = 50e-6
"""Overhead of each piece: slicing its rows and joining its outputs."""

_AROUND_SECONDS = 100e-6
"""Overhead of one execution in threads and futures, which the rows of a batch share."""

Arrays: TypeAlias = "list[jax.Array | Tensor]"
"""Arguments of an executable. Passing numpy arrays directly is faster than putting them on the
device first.
"""

Call: TypeAlias = "Callable[[Sequence[jax.Array], Arrays], list[jax.Array]]"


_NOTHING = Footprint()


@dataclass(frozen=True, slots=True)
class Program:
    """The executable of one bucket at one site, and its cost."""

    call: Call
    rows: int
    sizes: Sizes
    seconds: float
    """Fastest execution in seconds, because concurrent loads disturb measurements; infinity if not
    measured.
    """
    compile_seconds: float = 0.0
    """Compilation time in seconds; 0 if another model compiled it."""
    footprint: Footprint = _NOTHING
    key: Hashable = None
    """Key by which models share the programs of a computation."""


@dataclass(frozen=True, slots=True)
class Table:
    """The executables at one site that requests may use. Immutable."""

    buckets: tuple[int, ...] = ()
    programs: tuple[Program, ...] = ()
    may_split: bool = False
    """Whether batches may be executed in pieces: rows are independent, on a single CPU device."""
    splits: tuple[int, ...] = ()
    """Rows per piece for each full bucket, 0 to execute it whole; empty if none is split."""
    may_gain: bool = False
    """Whether pieces are faster for any number of rows."""

    def with_program(self, program: Program) -> "Table":
        """Return a new table with one more bucket."""
        at = bisect_left(self.buckets, program.rows)
        programs = (*self.programs[:at], program, *self.programs[at:])
        splits = tuple(_split(programs, one, one.rows) for one in programs if self.may_split)
        # Pieces gain most for the fewest rows of a bucket.
        may_gain = self.may_split and any(
            _split(programs, one, smaller.rows + 1) for smaller, one in pairwise(programs)
        )
        return Table(
            (*self.buckets[:at], program.rows, *self.buckets[at:]),
            programs,
            self.may_split,
            splits if any(splits) else (),
            may_gain,
        )

    def program_for(self, rows: int) -> Program:
        """Return the program of the smallest bucket that fits the rows, or the largest bucket."""
        # Search without the last bucket, so that larger row counts also get the last program.
        return self.programs[bisect_left(self.buckets, rows, 0, len(self.buckets) - 1)]

    def pieces_for(self, rows: int) -> tuple[Program, ...]:
        """Return the programs that execute this many rows in consecutive pieces.

        Returns one program if the rows are executed whole.
        """
        whole = self.program_for(rows)
        piece = _split(self.programs, whole, rows) if self.may_gain else 0
        if not piece:
            return (whole,)
        count, rest = divmod(rows, piece)
        pieces = (self.program_for(piece),) * count
        return (*pieces, self.program_for(rest)) if rest else pieces

    def batch_limit(self) -> int:
        """Return the bucket with the lowest time per row."""
        if self.programs and self.programs[-1].seconds == inf:
            return self.programs[-1].rows
        best, lowest = 0, inf
        for program in self.programs:
            per_row = (program.seconds + _AROUND_SECONDS) / program.rows
            if per_row < lowest * _WORTH_WHILE:
                best, lowest = program.rows, per_row
        return best


def _split(programs: Sequence[Program], whole: Program, rows: int) -> int:
    """Return the rows per piece that execute these rows fastest, or 0 to execute them whole."""
    # Do not split without a measurement.
    if not _LEAST_SPLIT_SECONDS <= whole.seconds < inf:
        return 0
    best, lowest = 0, whole.seconds * _WORTH_SPLITTING
    for piece in programs:
        if piece.rows < min(rows, whole.rows):
            count, rest = divmod(min(rows, whole.rows), piece.rows)
            seconds = count * (piece.seconds + _PIECE_SECONDS)
            if rest:
                last = next(program for program in programs if program.rows >= rest)
                seconds += last.seconds + _PIECE_SECONDS
            if seconds < lowest:
                best, lowest = piece.rows, seconds
    return best


class Copy:
    """One copy of a model: its parameters and programs at a site."""

    __slots__ = (
        "_adding",
        "leaves",
        "leaves_bytes",
        "may_split",
        "on_demand",
        "outputs",
        "replicas",
        "site",
        "table",
        "tables",
    )

    def __init__(
        self, site: Site, leaves: Sequence[jax.Array], replicas: int, elsewhere_bytes: int = 0
    ) -> None:
        self.site = site
        self.leaves = list(leaves)
        self.leaves_bytes = sum(_bytes_per_device(leaf) for leaf in leaves) - elsewhere_bytes
        """Bytes of parameters per device, without those that other processes account for."""
        self.replicas = replicas
        self.table = Table()
        """The table for requests if only the batch is dynamic; otherwise the table of the largest
        sizes.
        """
        self.tables: dict[Sizes, Table] = {}
        self.on_demand: tuple[Program, ...] = ()
        """Programs compiled on demand."""
        self.may_split = False
        """Whether tables created from now on may split batches."""
        self.outputs = site.outputs
        self._adding = threading.Lock()

    @property
    def in_flight(self) -> int:
        """Return the maximum number of concurrent executions."""
        return self.replicas * (IN_FLIGHT if self.site.is_accelerator else 1)

    def add(self, program: Program) -> None:
        """Make a program available to requests, unless an equal program is already in use."""
        with self._adding:
            before = self.tables.get(program.sizes) or Table(may_split=self.may_split)
            if program.rows in before.buckets:
                return
            # Copy on write: other threads look up sizes concurrently.
            self.tables = {**self.tables, program.sizes: before.with_program(program)}
            self.table = self.tables[max(self.tables)]

    @property
    def programs(self) -> list[Program]:
        """Return all programs, ordered by sizes and then by rows."""
        of_load = [found for sizes in sorted(self.tables) for found in self.tables[sizes].programs]
        return [*of_load, *self.on_demand]

    def split_rows(self, program: Program) -> int:
        """Return the rows per piece of a bucket, or 0 if it is executed whole."""
        table = self.tables.get(program.sizes)
        if table is None or program not in table.programs or not table.splits:
            return 0
        return table.splits[table.programs.index(program)]

    def clear(self) -> None:
        """Release parameters and executables."""
        self.leaves.clear()
        self.table = Table()
        self.tables = {}
        self.on_demand = ()


def copies_of(layout: Layout, parameters: DeviceParameters) -> tuple[Copy, ...]:
    """Return a copy for each site, without programs."""
    leaves = parameters.leaves or tuple([] for _ in layout.sites)
    elsewhere = parameters.elsewhere_bytes or tuple(0 for _ in layout.sites)
    return tuple(
        Copy(site, held, layout.replicas.count(index), elsewhere[index])
        for index, (site, held) in enumerate(zip(layout.sites, leaves, strict=True))
    )


def bucket_shape(spec: TensorSpec, bucket: int) -> tuple[int, ...]:
    """Return the input shape of a bucket's executable."""
    return (bucket, *spec.shape[1:]) if bucket != FIXED else spec.shape


def _bytes_per_device(leaf: jax.Array) -> int:
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize


def buckets_of(copies: Sequence[Copy], *, is_exact: bool = False) -> tuple[Bucket, ...]:
    """Describe the compiled programs; execution times are those of the first copy.

    `is_exact`: the first size of each program is its number of rows.
    """
    return tuple(
        Bucket(
            alike[0].sizes[0] if is_exact else alike[0].rows,
            sum(one.compile_seconds for one in alike),
            alike[0].seconds if alike[0].seconds < inf else 0.0,
            alike[0].sizes[1:] if is_exact else alike[0].sizes,
            copies[0].split_rows(alike[0]),
        )
        for alike in zip(*(copy.programs for copy in copies), strict=True)
    )
