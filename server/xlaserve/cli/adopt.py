"""`xlaserve adopt`: makes a version directory from a `jax.export` file."""

from pathlib import Path
from typing import Annotated

import typer

from xlaserve.cli.offline import recorded
from xlaserve.cli.pairs import pairs_of, sizes_of
from xlaserve.cli.rows import Independence, rows_shown
from xlaserve.cli.sizes import format_bytes
from xlaserve.cli.termination import unwinding_on_signals
from xlaserve.errors import InvalidModel
from xlaserve.residence.repository.names import check_name


def adopt(  # noqa: PLR0917, typer reads the parameters of a command from its signature
    file: Annotated[Path, typer.Argument(help="A *.jaxexp file written by jax.export.")],
    directory: Annotated[Path, typer.Argument(help="The model's directory: REPOSITORY/NAME.")],
    version: Annotated[int, typer.Option(help="Number of the version directory.")] = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the version if it exists.")
    ] = False,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", help="Input name; repeat once per array, in order."),
    ] = None,
    outputs: Annotated[
        list[str] | None,
        typer.Option("--output", help="Output name; repeat once per array, in order."),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(help="Maximum rows per request; defaults to 64 if there is a batch."),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(
            "--dim", help="NAME=SIZE,...: sizes of a dynamic dimension to compile; may be repeated."
        ),
    ] = None,
    max_on_demand_shapes: Annotated[
        int,
        typer.Option(
            "--on-demand", help="How many additional sizes to compile on demand and keep."
        ),
    ] = 0,
    batch_independent: Independence = None,
    training_mode: Annotated[
        bool,
        typer.Option(
            "--training-mode", help="Accept layers in training mode instead of refusing them."
        ),
    ] = False,
    for_target: recorded.Targets = None,
) -> None:
    """Make a checked, named version directory from a jax.export file."""
    # These import JAX, which would slow down the other commands.
    from xlaserve.artifact import manifest
    from xlaserve.artifact.plain_artifact import Names
    from xlaserve.authoring import adopting

    check_name("model", directory.absolute().name)
    options = adopting.Options(
        names=Names(inputs or None, outputs or None),
        max_batch_size=max_batch_size,
        batch_independent=batch_independent,
        compiled_shapes=pairs_of("--dim", dim, sizes_of) or None,
        max_on_demand_shapes=max_on_demand_shapes,
        training_mode=training_mode,
    )
    notices: list[str] = []
    try:
        with unwinding_on_signals():
            path = adopting.read(file, options).write(
                directory / str(version), overwrite=overwrite, on_notice=notices.append
            )
    except FileExistsError as error:
        raise InvalidModel(str(error).replace("overwrite=True", "--overwrite")) from error
    recorded.record(path, for_target)
    described = manifest.read(path)
    typer.echo(f"{path}: {format_bytes(sum(part.stat().st_size for part in path.iterdir()))}")
    for kind, specs in (("input", described.inputs), ("output", described.outputs)):
        for spec in specs:
            typer.echo(f"{kind} {spec.name} {spec}")
    for line in rows_shown(described, notices):
        typer.echo(line)
