"""`xlaserve import MODEL.pt2`: a version directory from a program of torch.export."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from xlaserve.cli.progress import progress_bar
from xlaserve.cli.rows import rows_shown
from xlaserve.cli.sizes import format_bytes
from xlaserve.importers.pt2.importing import SUFFIX, Imported, Options, import_program
from xlaserve.runtime.devices import device
from xlaserve.runtime.loaded import Stage


def is_program(model: Path) -> bool:
    """Tell whether a file is a program of torch.export, by its name."""
    return model.suffix == SUFFIX


def run(model: Path, directory: Path, options: Options) -> Path:
    """Import a program with a progress bar, print the result, and return its path."""
    # The same numbers on every machine, also where a GPU would calculate with fewer bits.
    device.start("cpu")
    with progress_bar() as progress:
        bar = progress.add_task(model.name, total=None)

        def show(stage: Stage) -> None:
            progress.update(bar, description=f"{model.name}: {stage}")

        imported = import_program(model, directory, options, show)
    console = Console()
    _show(console, imported)
    if imported.labels:
        console.print(imported.labels, soft_wrap=True, highlight=False, markup=False)
    return imported.path


def _show(console: Console, imported: Imported) -> None:
    described = imported.manifest
    table = Table("", "name", "tensor")
    for kind, specs in (("input", described.inputs), ("output", described.outputs)):
        for spec in specs:
            table.add_row(kind, spec.name, str(spec))
    console.print(table)
    console.print(
        f"{imported.path}: PyTorch {imported.torch_version}, {imported.nodes} nodes, "
        f"{len(described.parameters)} parameters of {format_bytes(described.parameters_bytes)}, "
        f"max_batch_size {described.max_batch_size}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    for line in rows_shown(described, [imported.notice] if imported.notice else []):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
