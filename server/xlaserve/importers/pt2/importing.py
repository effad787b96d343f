"""The import of a .pt2 file of torch.export as a version directory, without PyTorch."""

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
    """None for the one after the highest."""
    max_batch_size: int | None = None
    """None for 32, or fewer where the program says so, if one open dimension is first in every
    input, else 0."""
    dimensions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Sizes of open dimensions, by the names of their symbols; the model is compiled for each of
    several."""
    outputs: Sequence[str] = ()
    """Kept outputs; empty for all."""
    limit_bytes: int = DEFAULT_LIMIT_BYTES
    """Most bytes of the file, and of any tensor that the program makes."""
    labels: Sequence[str] = ()
    """The classes of the output that has a number for each."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Parameters of the configuration written beside the versions."""
    batch_independent: bool | None = None
    """Declared row independence; None to rely on the proof."""
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Configured input shapes, -1 for an open size; other inputs are absent."""
    is_mapped: bool = True
    """Whether tensors are views of the file: a server copies, for a file that is truncated while
    it is mapped ends the process."""
    roots: Roots = ANYWHERE
    """The directories that the file may lie in."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an import."""

    path: Path
    manifest: Manifest
    torch_version: str
    nodes: int
    notice: str = ""
    """Why requests will not be batched, and unsupported platforms; empty for neither."""
    labels: str = ""
    """Label files written next to the versions, with the configuration they need; empty for none.
    """


def import_program(
    path: Path,
    directory: Path,
    options: Options | None = None,
    on_stage: OnStage = lambda stage: None,
) -> Imported:
    """Convert a program to a version directory of `directory` (REPOSITORY/NAME) and return it.

    Raises InvalidModel, or FileExistsError where the version is there already.
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
    """Convert a program to an Exportable whose tensors are arguments."""
    program = read.program
    for name in options.outputs:
        if name not in program.outputs:
            raise InvalidModel(f"there is no output '{name}', but {', '.join(program.outputs)}")
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
        # PyTorch has 64-bit integers everywhere, in the answers too.
        x64=True,
        batch_independent=options.batch_independent,
        compiled_shapes=inputs.compiled or None,
    )
