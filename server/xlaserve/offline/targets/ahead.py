"""Compiles the programs of a model's load for devices that only the compiler knows."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import NoReturn

import jax

from xlaserve.artifact import onnx_source, plain_artifact
from xlaserve.artifact.shapes import OpenDimensions
from xlaserve.errors import InvalidModel
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.model_config.config import ModelConfig
from xlaserve.offline.targets.topology import Device
from xlaserve.row_proofs import neighbours
from xlaserve.runtime.devices import sites
from xlaserve.runtime.devices.device_parameters import DeviceParameters
from xlaserve.runtime.exported import single_file, version_files
from xlaserve.runtime.loaded import ModelMemory
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.compile_plan import CompilePlan
from xlaserve.runtime.programs.executables import Executables
from xlaserve.runtime.programs.footprint import Footprint
from xlaserve.runtime.programs.held_memory import memory_of
from xlaserve.runtime.programs.program_table import Copy, Program, copies_of
from xlaserve.runtime.programs.programs import Compiler, Place
from xlaserve.runtime.programs.proving import Prover
from xlaserve.runtime.programs.shared_programs import SharedPrograms


@dataclass(frozen=True, slots=True)
class Ahead:
    """A model prepared for compilation, without its parameters."""

    plan: CompilePlan
    copies: tuple[Copy, ...]
    compiler: Compiler
    module_bytes: int
    trials: tuple[Compiler, ...] = ()
    """Compilers of the programs with which a load verifies declared row independence."""

    @staticmethod
    def read(
        path: Path,
        config: ModelConfig,
        platform: str,
        present: Sequence[Device],
        roots: Roots = ANYWHERE,
        *,
        compilation: Compilation | None = None,
    ) -> "Ahead":
        """Read a version directory or a model file, for a server with the devices `present`.

        Raises InvalidModel as a load does. Declared row independence is not verified, since that
        takes an execution. `prepare` requires a `compilation` that has a cache.
        """
        if onnx_source.is_unconverted(path, config):
            raise InvalidModel(
                "ONNX and .pt2 files are converted at their first load: to compile ahead, use"
                " `xlaserve import` first"
            )
        read = single_file.read if plain_artifact.find(path) else version_files.read
        version = read(path, config, platform, roots)
        # A server with GPUs may place the model on the CPU.
        there = present if version.placement.platform == platform else None
        layout = sites.layout(version.placement, there)
        version.check_layout(layout)
        parameters = DeviceParameters()
        if version.described is not None:
            parameters = DeviceParameters.described(path, version.described, layout.sites, roots)
        copies = copies_of(layout, parameters)
        tried: list[OpenDimensions] = []
        lease = SharedPrograms().lease(version.computation.key, version.computation.exported)
        plan = CompilePlan.of(
            lease,
            version.signature,
            version.config,
            Prover(copies[0].site, Compilation()),
            # The prover's stand-in: collects the dimensions to try, and reports no difference.
            tried.append,
        )
        executables = Executables(lease, parameters.packing, compilation)
        compiler, *trials = [
            Compiler(lease, executables, version.signature, copies, dimensions)
            for dimensions in (plan.dimensions, *tried)
        ]
        module_bytes = len(version.computation.exported.mlir_module_serialized)
        return Ahead(plan, copies, compiler, module_bytes, tuple(trials))

    def work(self) -> list[Place]:
        """Return the programs that a load compiles."""
        return self.compiler.work(self.plan.buckets.sizes)

    def lowered(self, place: Place) -> jax.stages.Lowered:
        """Return a program lowered for XLA."""
        return self.compiler.lowered(*place)

    def prepare(self) -> Iterator[tuple[Place, float]]:
        """Compile every program of a load into the cache; yield the seconds of each compilation."""
        for place in self.work():
            yield place, self.compiler.prepare(*place)
        for trial in self.trials:
            for place in trial.work((1, neighbours.SUBJECTS, *neighbours.BATCHES)):
                if place[0] is self.copies[0]:
                    yield place, trial.prepare(*place)

    def note(self, place: Place, footprint: Footprint) -> None:
        """Add a compiled program's memory to the model's footprint."""
        copy, rows, sizes = place
        copy.add(Program(_never_called, rows, sizes, inf, footprint=footprint))

    @property
    def memory(self) -> ModelMemory:
        """Return the memory that a server would reserve for the noted programs and parameters."""
        return memory_of(self.copies, self.module_bytes)


def _never_called(leaves: object, arguments: object) -> NoReturn:
    raise AssertionError("compiled for an absent device")
