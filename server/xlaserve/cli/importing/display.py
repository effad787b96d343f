"""The terminal's display of an import: its progress, then the written files."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from xlaserve.cli.progress import progress_bar
from xlaserve.cli.rows import rows_shown
from xlaserve.cli.sizes import format_bytes
from xlaserve.importers.onnx.importing import Imported, Options, import_model
from xlaserve.runtime.devices import device
from xlaserve.runtime.loaded import Stage


def run(model: Path, directory: Path, options: Options) -> Path:
    """Import a model with a progress bar, print the result, and return its path."""
    # The same numbers on every machine, also where a GPU would calculate with fewer bits.
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

        imported = import_model(model, directory, options, show)
    _show(Console(), imported)
    return imported.path


def _show(console: Console, imported: Imported) -> None:
    described = imported.manifest
    table = Table("", "name", "tensor")
    for kind, specs in (("input", described.inputs), ("output", described.outputs)):
        for spec in specs:
            table.add_row(kind, spec.name, str(spec))
    console.print(table)
    console.print(f"{imported.path}: {_summary(imported)}", soft_wrap=True, highlight=False)
    console.print(_comparison(imported), soft_wrap=True, highlight=False)
    if imported.labels:
        console.print(imported.labels, soft_wrap=True, highlight=False, markup=False)
    for line in rows_shown(imported.manifest, [imported.notice] if imported.notice else []):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _summary(imported: Imported) -> str:
    described = imported.manifest
    return (
        f"opset {imported.opset}, {imported.nodes} operators, {len(described.parameters)} "
        f"parameters of {format_bytes(described.parameters_bytes)}, max_batch_size "
        f"{described.max_batch_size}"
    )


def _comparison(imported: Imported) -> str:
    checked = imported.checked
    if checked is None:
        return (
            "not checked: it was not compared with onnxruntime, which is not installed or not asked"
        )
    worst = checked.worst
    batches = " and ".join(map(str, checked.batches))
    rows = "" if checked.batches == (0,) else f", batches of {batches}"
    return (
        f"checked against onnxruntime {checked.runtime}{rows}: largest difference "
        f"{worst.absolute:.2e}, relative {worst.relative:.2e}, in '{worst.output}'"
        + (f"; allowed are {checked.allowed}" if checked.allowed else "")
    )
