"""`xlaserve export`: makes a version directory from a function and its parameters."""

from pathlib import Path
from typing import Annotated

import typer

from xlaserve.cli.author_errors import reported_in_one_line
from xlaserve.cli.offline import recorded
from xlaserve.cli.rows import rows_shown
from xlaserve.cli.sizes import format_bytes
from xlaserve.cli.termination import unwinding_on_signals
from xlaserve.errors import InvalidModel


def export(  # noqa: PLR0917, typer reads the parameters of a command from its signature
    target: Annotated[
        str,
        typer.Argument(
            help="path/file.py:name or package.module:name of an xlaserve.Exportable or a"
            " function returning one."
        ),
    ],
    directory: Annotated[Path, typer.Argument(help="The model's directory: REPOSITORY/NAME.")],
    version: Annotated[int, typer.Option(help="Number of the version directory.")] = 1,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the version if it exists.")
    ] = False,
    params: Annotated[
        str | None,
        typer.Option(
            help="npz:FILE, safetensors:FILE or orbax:DIR with the parameters, named by their"
            " paths in the Exportable, which may then hold jax.ShapeDtypeStruct."
        ),
    ] = None,
    for_target: recorded.Targets = None,
    with_traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of an exception.")
    ] = False,
) -> None:
    """Export a JAX function and its parameters as a model."""
    from xlaserve.artifact import manifest
    from xlaserve.authoring.export import load_exportable, with_parameters

    notices: list[str] = []
    try:
        with unwinding_on_signals(), reported_in_one_line(target, with_traceback=with_traceback):
            model = load_exportable(target)
            if params is not None:
                model = with_parameters(model, params)
            path = model.write(
                directory / str(version), overwrite=overwrite, on_notice=notices.append
            )
    except FileExistsError as error:
        raise InvalidModel(str(error).replace("overwrite=True", "--overwrite")) from error
    recorded.record(path, for_target)
    size = sum(file.stat().st_size for file in path.iterdir())
    typer.echo(f"{path}: {format_bytes(size)}")
    for line in rows_shown(manifest.read(path), notices):
        typer.echo(line)
