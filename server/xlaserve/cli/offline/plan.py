"""`xlaserve plan`: sizes a repository for GPUs or TPUs that you do not have."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from xlaserve.cli.offline import plan_display
from xlaserve.cli.printable import printable
from xlaserve.cli.progress import progress_bar
from xlaserve.cli.termination import unwinding_on_signals
from xlaserve.offline.device_plan import DevicePlan, DevicePlanner
from xlaserve.offline.local_copy import local_copy
from xlaserve.offline.targets.compiling import MAX_CHILDREN, Compilers
from xlaserve.offline.targets.jobs import Compiled
from xlaserve.process import log
from xlaserve.residence.repository.repositories import open_repositories
from xlaserve.runtime.devices import target_kinds as kinds
from xlaserve.settings import Settings

_FAILED = 1


def plan(  # noqa: PLR0917, typer reads the parameters of a command from its signature
    repository: Annotated[Path, typer.Argument(help="Directory of the models, or a URL.")],
    target: Annotated[str, typer.Option(help=f"The kind of device: {', '.join(kinds.TARGETS)}.")],
    count: Annotated[int, typer.Option(help="Devices per host: 1, 2, 4 or 8.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    cache: Annotated[
        Path | None,
        typer.Option(help="Directory that keeps compiler results for the next plan."),
    ] = None,
    capacity_bytes: Annotated[
        int, typer.Option(help="Memory for models per device; 0 uses the device's memory.")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Models compiled in parallel.")] = MAX_CHILDREN,
) -> None:
    """Compile a repository for absent devices, and show what fits on them.

    The exit status is 1 if a model is broken, does not compile, or does not fit by itself.
    """
    log.configure("warning")
    row = kinds.named(target)
    settings = Settings.read(repository=repository, capacity_bytes=capacity_bytes)
    directory = "" if cache is None else str(cache.absolute())
    with (
        unwinding_on_signals(),
        local_copy(settings) as copy,
        Compilers(most=jobs) as compilers,
        _progress() as on_done,
    ):
        models = open_repositories(copy.settings)
        made = DevicePlanner(copy.settings, models, compilers).plan(
            row, count, cache_directory=directory, on_done=on_done
        )
    if copy.failures:
        made = replace(made, unreadable={**made.unreadable, **copy.failures})
    if as_json:
        typer.echo(plan_display.as_json(made))
    else:
        plan_display.show(Console(), made)
    if _is_wrong(made):
        raise typer.Exit(_FAILED)


def _is_wrong(made: DevicePlan) -> bool:
    """Tell whether a server could not load one of the models."""
    return bool(made.unreadable) or any(
        [one.compiled.problem for one in made.versions] + [load.refused for load in made.loads]
    )


@contextmanager
def _progress() -> Iterator[Callable[[Compiled], None]]:
    """Show the latest compiled program on stderr, while a block runs."""
    with progress_bar() as progress:
        bar = progress.add_task("compiling", total=None)

        def on_done(done: Compiled) -> None:
            progress.update(bar, advance=1, description=f"compiled {printable(done.job.model)}")

        yield on_done
