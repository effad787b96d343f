"""Imports a .pt2 file of torch.export as a version directory, without PyTorch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax

from xlaserve.artifact import manifest, version_numbers
from xlaserve.artifact.manifest import Manifest
from xlaserve.authoring.cpu.optimizing import optimize
from xlaserve.authoring.export import Exportable
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.files.temporary import TemporaryDirectory
from xlaserve.importers.onnx import configuring
from xlaserve.importers.onnx.signature import Inputs
from xlaserve.importers.pt2 import archive
from xlaserve.importers.pt2.aliasing import Reference
from xlaserve.importers.pt2.archive import DEFAULT_LIMIT_BYTES, Archive
from xlaserve.importers.pt2.inputs import resolve, said_sizes
from xlaserve.importers.pt2.running import Runner, outputs
from xlaserve.runtime.loaded import Stage
from xlaserve.tensors import Tensor

SUFFIX = ".pt2"

OnStage = Callable[[Stage], None]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an import."""

    version: int | None = None
    """Version number to write; None for the number after the highest existing one."""
    max_batch_size: int | None = None
    """Largest batch. None means 32, or the program's maximum if that is lower, if every input
    starts with the same dynamic dimension, otherwise 0."""
    dimensions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Sizes of dynamic dimensions, by symbol; with several sizes a program is compiled for each."""
    outputs: Sequence[str] = ()
    """Outputs to keep; empty for all."""
    limit_bytes: int = DEFAULT_LIMIT_BYTES
    """Size limit of the file, and of each tensor that the program computes."""
    labels: Sequence[str] = ()
    """Class labels for the output that has a score per class."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Parameters to write to the model's config.pbtxt."""
    batch_independent: bool | None = None
    """Declares whether rows are independent; None to prove it."""
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Input shapes from config.pbtxt, -1 for a dynamic size; inputs may be missing."""
    is_mapped: bool = True
    """Whether tensors are views of the mapped file. Servers copy instead, because truncating a
    mapped file kills the process."""
    roots: Roots = ANYWHERE
    """Directories that the file must be in."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import."""

    path: Path
    manifest: Manifest
    torch_version: str
    nodes: int
    notice: str = ""
    """Why requests cannot be batched, and unsupported platforms; empty if there is nothing to
    report."""
    labels: str = ""
    """Message about the label file and config.pbtxt; empty if there are none."""


def import_program(
    path: Path,
    directory: Path,
    options: Options | None = None,
    on_stage: OnStage = lambda stage: None,
) -> Imported:
    """Convert a program to a version directory of `directory` (REPOSITORY/NAME) and return it.

    Raises InvalidModel, and FileExistsError if the version exists.
    """
    options = options or Options()
    target = version_numbers.target(directory, options.version)
    on_stage(Stage("reading"))
    read = _read(path, options)
    dimensions = {**said_sizes(read.program, options.sizes), **options.dimensions}
    inputs = resolve(read.program, dimensions, options.max_batch_size)
    made = exportable(read, inputs, options)
    on_stage(Stage("exporting"))
    notices: list[str] = []
    with TemporaryDirectory.beside(directory) as staging:
        written = made.write(staging.path / target.name, on_notice=notices.append)
        described = manifest.read(written)
        labels = configuring.named(described, options.labels) if options.labels else {}
        version_numbers.publish(written, target)
    return Imported(
        target,
        described,
        read.program.torch_version,
        len(read.program.graph.nodes),
        "; ".join(notices),
        configuring.write(directory, described, labels, options.parameters),
    )


def _read(path: Path, options: Options) -> Archive:
    if options.is_mapped:
        return archive.open_file(path, options.limit_bytes, options.roots)
    data = files.read_checked(
        path.parent, path.name, limit_bytes=options.limit_bytes, roots=options.roots
    )
    if not data:
        raise InvalidModel(f"{path.name} is empty")
    return archive.read(bytes(data), options.limit_bytes)


def exportable(read: Archive, inputs: Inputs, options: Options) -> Exportable:
    """Convert a program to an Exportable whose parameters are arguments."""
    program = read.program
    for name in options.outputs:
        if name not in program.outputs:
            raise InvalidModel(
                f"unknown output '{name}', the model has {', '.join(program.outputs)}"
            )
    wanted = tuple(options.outputs) or tuple(program.outputs)
    if not wanted:
        raise InvalidModel("the model has no outputs")
    read_names = program.graph.reads()
    used = {name: stored.name for name, stored in program.stored.items() if name in read_names}
    runner = Runner(options.limit_bytes)

    def model(parameters: Mapping[str, jax.Array], *tensors: jax.Array) -> dict[str, jax.Array]:
        given = {
            name: Reference.fresh(parameters[key], str(program.stored[name]))
            for name, key in used.items()
        }
        for name, tensor in zip(program.inputs, tensors, strict=True):
            given[name] = Reference.fresh(tensor, f"input '{name}'")
        values = runner.run(program.graph, given)
        return outputs(values, program.outputs, wanted)

    parameters: dict[str, Tensor] = {key: read.tensors[name] for name, key in used.items()}
    return Exportable(
        optimize(model),
        parameters,
        inputs.exported(),
        wanted,
        inputs.max_batch_size,
        # PyTorch uses 64-bit integers everywhere, also in outputs.
        x64=True,
        batch_independent=options.batch_independent,
        compiled_shapes=inputs.compiled or None,
    )
