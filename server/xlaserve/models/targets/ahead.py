"""Compiles what a load would compile, for devices that only the compiler knows."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NoReturn

import jax

from xlaserve.models import single_file, sites, version_files
from xlaserve.models.compile_plan import CompilePlan
from xlaserve.models.config import ModelConfig
from xlaserve.models.footprint import Footprint
from xlaserve.models.held_memory import memory_of
from xlaserve.models.loaded import ModelMemory
from xlaserve.models.programs import (
    Compiler,
    Copy,
    DeviceParameters,
    Program,
    copies_of,
)
from xlaserve.models.roots import ANYWHERE, Roots
from xlaserve.models.shapes import Sizes
from xlaserve.models.targets.topology import Device

Place = tuple[Copy, int, Sizes]
"""For which copy a program is, how many rows (`buckets.FIXED` for none), which other sizes."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """A model as a load would compile it. No parameter of it is anywhere."""

    plan: CompilePlan
    copies: tuple[Copy, ...]
    compiler: Compiler
    constants_bytes: int
    module_bytes: int

    @staticmethod
    def read(
        path: Path,
        config: ModelConfig,
        platform: str,
        present: Sequence[Device],
        roots: Roots = ANYWHERE,
    ) -> "Ahead":
        """Read a version directory, or a file that is a model, for a server that has `present`.

        Raises InvalidModel as a load does. Rows that are only declared independent are not tried,
        which takes an execution.
        """
        read = single_file.read if path.is_file() else version_files.read
        version = read(path, config, platform, roots)
        # A model may go to the CPU of a server with GPUs.
        there = present if version.placement.platform == platform else None
        layout = sites.layout(version.placement, there)
        version.check_layout(layout)
        parameters = DeviceParameters()
        if version.described is not None:
            parameters = DeviceParameters.described(path, version.described, layout.sites, roots)
        copies = copies_of(layout, parameters)
        plan = CompilePlan.of(
            version.exported,
            version.signature,
            version.config,
            copies[0].site.platform,
            lambda tried: None,
        )
        compiler = Compiler(
            version.exported, parameters.constants, version.signature, copies, plan.dimensions
        )
        module_bytes = len(version.exported.mlir_module_serialized)
        return Ahead(plan, copies, compiler, parameters.constants_bytes, module_bytes)

    def work(self) -> list[Place]:
        """Return the programs that a load compiles."""
        return self.compiler.work(self.plan.buckets.sizes)

    def lowered(self, place: Place) -> jax.stages.Lowered:
        """Return one of them as XLA compiles it."""
        return self.compiler.lowered(*place)

    def note(self, place: Place, footprint: Footprint) -> None:
        """Take into account what a compiled one takes."""
        copy, rows, sizes = place
        copy.add(Program(_never_called, rows, sizes, inf, footprint=footprint))

    @property
    def memory(self) -> ModelMemory:
        """Return what a server reserves for the programs that were noted, and the parameters."""
        return memory_of(self.copies, self.constants_bytes, self.module_bytes)


def _never_called(leaves: object, arguments: object) -> NoReturn:
    raise AssertionError("compiled for a device that is not there")
