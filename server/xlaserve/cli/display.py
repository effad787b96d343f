"""The terminal display while models load, and the table of models afterwards."""

from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from xlaserve.app.display import Addresses, ModelRow
from xlaserve.cli.printable import printable
from xlaserve.cli.sizes import format_bytes
from xlaserve.process.endpoints import NO_ENDPOINT
from xlaserve.runtime.loaded import Stage


def model_table(rows: Sequence[ModelRow]) -> Table:
    """Return a table of the models with state, size and compile time."""
    table = Table("model", "version", "state")
    table.add_column("size", justify="right")
    table.add_column("compile time", justify="right")
    for row in rows:
        entry = row.entry
        state = entry.state if not entry.reason else f"{entry.state}: {entry.reason}"
        size = "" if row.size_bytes is None else format_bytes(row.size_bytes)
        seconds = "" if row.compile_seconds is None else f"{row.compile_seconds:.2f} s"
        table.add_row(
            Text(printable(entry.name)), entry.version, Text(printable(state)), size, seconds
        )
    return table


class TerminalDisplay:
    """Progress bars while models load and compile, then a table."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[model]}"),
            BarColumn(),
            TextColumn("{task.fields[stage]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._bars: dict[tuple[str, str], TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def listening(self, addresses: Addresses) -> None:
        """Print the addresses of the endpoints."""
        for protocol, address in (("gRPC", addresses.grpc), ("HTTP", addresses.http)):
            if address not in (None, NO_ENDPOINT):
                self._console.print(f"{protocol} on [bold]{address}[/bold]", highlight=False)
        self._progress.start()

    def stage(self, model: str, version: str, stage: Stage) -> None:
        """Update the progress bar of a model."""
        bar = self._bars.get((model, version))
        if bar is None:
            bar = self._progress.add_task("", total=None, model=escape(printable(model)), stage="")
            self._bars[model, version] = bar
        self._progress.update(
            bar, total=stage.steps or None, completed=stage.step, stage=escape(str(stage))
        )
        if stage.name == "warming" and stage.step == stage.steps:
            self._progress.remove_task(self._bars.pop((model, version)))

    def started(self, rows: Sequence[ModelRow]) -> None:
        """Remove the progress bars, and print the table."""
        self._progress.stop()
        self._bars.clear()
        self._console.print(model_table(rows))
