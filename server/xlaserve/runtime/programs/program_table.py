"""The executables at one site by bucket, and the cost of each."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import ceil, inf
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
"""A larger batch is worth the wait where its time per row is at most this part of the other's."""

_WORTH_SPLITTING = 0.6
"""A batch is executed in pieces where they take at most this part of its time: on a busy machine
two measurements of the same differ by a third."""

_LEAST_SPLIT_SECONDS = 1e-3
"""Faster batches are executed whole: splitting would gain less than the error of an interrupted
measurement.
"""

_PIECE_SECONDS = 50e-6
"""Overhead of each piece: slicing its rows and joining its outputs."""

_AROUND_SECONDS = 100e-6
"""Overhead of one execution, in threads and futures: it is shared by the rows as well."""

Arrays: TypeAlias = "list[jax.Array | Tensor]"
"""Arguments of an executable: numpy arrays go in as they are, which is quicker than putting them
on the device first."""

Call: TypeAlias = "Callable[[Sequence[jax.Array], Arrays], list[jax.Array]]"


_NOTHING = Footprint()


@dataclass(frozen=True, slots=True)
class Program:
    """The executable of one bucket at one site, and its cost."""

    call: Call
    rows: int
    sizes: Sizes
    seconds: float
    """The fastest run, since concurrent loads disturb each other's measurements; infinity if none
    was measured.
    """
    compile_seconds: float = 0.0
    """0 where another model had it compiled."""
    footprint: Footprint = _NOTHING
    key: Hashable = None
    """The key by which models share the computation's programs."""


@dataclass(frozen=True, slots=True)
class Table:
    """The executables at one site that requests may use. A new bucket makes a new table."""

    buckets: tuple[int, ...] = ()
    programs: tuple[Program, ...] = ()
    may_split: bool = False
    """Whether batches may be executed in pieces: their rows are independent, on one CPU device."""
    splits: tuple[int, ...] = ()
    """For each bucket the rows of its pieces, 0 where it is executed whole; empty where all are."""

    def with_program(self, program: Program) -> "Table":
        """Return the table with one more bucket."""
        at = bisect_left(self.buckets, program.rows)
        programs = (*self.programs[:at], program, *self.programs[at:])
        splits = tuple(_split(programs, one) for one in programs) if self.may_split else ()
        return Table(
            (*self.buckets[:at], program.rows, *self.buckets[at:]),
            programs,
            self.may_split,
            splits if any(splits) else (),
        )

    def program_for(self, rows: int) -> Program:
        """Return the smallest bucket's program that holds the rows, else the largest."""
        # The last bucket is left out, so that what is beyond it finds the last program as well.
        return self.programs[bisect_left(self.buckets, rows, 0, len(self.buckets) - 1)]

    def pieces_for(self, rows: int) -> tuple[Program, ...]:
        """Return the programs that execute this many rows in consecutive pieces.

        One program where they are executed whole.
        """
        at = bisect_left(self.buckets, rows, 0, len(self.buckets) - 1)
        piece = self.splits[at] if self.splits else 0
        if not 0 < piece < rows:
            return (self.programs[at],)
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


def _split(programs: Sequence[Program], whole: Program) -> int:
    """Return the piece sizes that execute a bucket fastest; 0 to execute it whole."""
    # Where nothing was measured, nothing is known.
    if not _LEAST_SPLIT_SECONDS <= whole.seconds < inf:
        return 0
    best, lowest = 0, whole.seconds * _WORTH_SPLITTING
    for piece in programs:
        if piece.rows < whole.rows:
            seconds = ceil(whole.rows / piece.rows) * (piece.seconds + _PIECE_SECONDS)
            if seconds < lowest:
                best, lowest = piece.rows, seconds
    return best


class Copy:
    """One copy of a model: its parameters and its programs at a site."""

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
        """Bytes per device of the site, less those that other processes account for."""
        self.replicas = replicas
        self.table = Table()
        """Table that serves where no dimension but the batch is open; else of the largest sizes."""
        self.tables: dict[Sizes, Table] = {}
        self.on_demand: tuple[Program, ...] = ()
        """Programs that were compiled because a request asked for them."""
        self.may_split = False
        """Whether tables that begin from now on may split batches."""
        self.outputs = site.outputs
        self._adding = threading.Lock()

    @property
    def in_flight(self) -> int:
        """Return the limit of concurrent executions."""
        return self.replicas * (IN_FLIGHT if self.site.is_accelerator else 1)

    def add(self, program: Program) -> None:
        """Make a program available to requests; one already in use is kept."""
        with self._adding:
            before = self.tables.get(program.sizes) or Table(may_split=self.may_split)
            if program.rows in before.buckets:
                return
            # Threads look sizes up while others are added: a new dict, as the table is a new one.
            self.tables = {**self.tables, program.sizes: before.with_program(program)}
            self.table = self.tables[max(self.tables)]

    @property
    def programs(self) -> list[Program]:
        """Return all programs, ordered by sizes and then by rows."""
        of_load = [found for sizes in sorted(self.tables) for found in self.tables[sizes].programs]
        return [*of_load, *self.on_demand]

    def split_rows(self, program: Program) -> int:
        """Return the piece sizes of a bucket; 0 where it is executed whole."""
        table = self.tables.get(program.sizes)
        if table is None or program not in table.programs or not table.splits:
            return 0
        return table.splits[table.programs.index(program)]

    def clear(self) -> None:
        """Drop parameters and executables."""
        self.leaves.clear()
        self.table = Table()
        self.tables = {}
        self.on_demand = ()


def copies_of(layout: Layout, parameters: DeviceParameters) -> tuple[Copy, ...]:
    """Return a copy for each site, with nothing compiled."""
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

    `is_exact`: the first of the sizes is the number of rows.
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
