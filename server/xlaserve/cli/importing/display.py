"""The progress and results of an import on a terminal."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from xlaserve.artifact.manifest import Manifest
from xlaserve.cli.progress import progress_bar
from xlaserve.cli.rows import rows_shown
from xlaserve.cli.sizes import format_bytes
from xlaserve.importers.onnx.importing import Imported, Options, import_model
from xlaserve.importers.pt2.importing import Options as ProgramOptions
from xlaserve.importers.pt2.importing import import_program
from xlaserve.runtime.devices import device
from xlaserve.runtime.loaded import Stage

T = TypeVar("T")


def run_onnx(model: Path, directory: Path, options: Options) -> Path:
    """Import an ONNX model with a progress bar, print the result, and return its path."""
    made = _with_bar(model, lambda on_stage: import_model(model, directory, options, on_stage))
    what = f"opset {made.opset}, {made.nodes} operators"
    rows = rows_shown(made.manifest, [made.notice] if made.notice else [])
    _show(made.path, made.manifest, what, (_comparison(made), made.labels, *rows))
    return made.path


def run_program(model: Path, directory: Path, options: ProgramOptions) -> Path:
    """Import a PyTorch program with a progress bar, print the result, and return its path."""
    made = _with_bar(model, lambda on_stage: import_program(model, directory, options, on_stage))
    what = f"PyTorch {made.torch_version}, {made.nodes} nodes"
    rows = rows_shown(made.manifest, [made.notice] if made.notice else [])
    _show(made.path, made.manifest, what, (*rows, made.labels))
    return made.path


def _with_bar(model: Path, make: Callable[[Callable[[Stage], None]], T]) -> T:
    # The CPU gives the same numbers on every machine; a GPU may compute with lower precision.
    device.start("cpu")
    with progress_bar() as progress:
        bar = progress.add_task(model.name, total=None)

        def show(stage: Stage) -> None:
            progress.update(
                bar,
                description=f"{model.name}: {stage}",
                total=stage.steps or None,
                completed=stage.step,
            )

        return make(show)


def _show(path: Path, described: Manifest, what: str, lines: Iterable[str]) -> None:
    table = Table("", "name", "tensor")
    for kind, specs in (("input", described.inputs), ("output", described.outputs)):
        for spec in specs:
            table.add_row(kind, spec.name, str(spec))
    summary = (
        f"{path}: {what}, {len(described.parameters)} parameters of "
        f"{format_bytes(described.parameters_bytes)}, max_batch_size {described.max_batch_size}"
    )
    console = Console()
    console.print(table)
    for line in filter(None, (summary, *lines)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _comparison(imported: Imported) -> str:
    checked = imported.checked
    if checked is None:
        return "not checked against onnxruntime (not installed, or --no-check)"
    worst = checked.worst
    batches = " and ".join(map(str, checked.batches))
    rows = "" if checked.batches == (0,) else f", batches of {batches}"
    return (
        f"checked against onnxruntime {checked.runtime}{rows}: largest difference "
        f"{worst.absolute:.2e}, relative {worst.relative:.2e}, in '{worst.output}'"
        + (f"; allowed are {checked.allowed}" if checked.allowed else "")
    )
