"""`xlaserve import`: a version directory from an ONNX file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from xlaserve.cli import recorded
from xlaserve.cli.termination import unwinding_on_signals
from xlaserve.core.residence.names import check_name
from xlaserve.errors import InvalidModel, InvalidRequest

_Value = TypeVar("_Value")


def import_onnx(  # noqa: PLR0917, typer reads the parameters of a command from its signature
    model: Annotated[Path, typer.Argument(help="The ONNX file.")],
    directory: Annotated[Path, typer.Argument(help="The model's directory: REPOSITORY/NAME.")],
    version: Annotated[
        int | None, typer.Option(help="Number of the version directory; else the next one.")
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(help="Else 32 where every input has an open first dimension, and 0."),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option("--dim", help="NAME=SIZE of an open dimension; may be repeated."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape", help="INPUT=-1,3,224,224 in place of the model's; may be repeated."
        ),
    ] = None,
    output: Annotated[
        list[str] | None, typer.Option("--output", help="An output to keep; else all.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare with onnxruntime.")
    ] = True,
    tolerance: Annotated[
        float, typer.Option(help="How far an output may be off, relative to its largest number.")
    ] = 1e-4,
    limit_bytes: Annotated[
        int, typer.Option(help="The most bytes of the model and its external data.")
    ] = 8 * 2**30,
    for_target: Annotated[list[str] | None, typer.Option("--target", help=recorded.HELP)] = None,
    batch_independent: Annotated[
        bool | None,
        typer.Option(
            "--batch-independent/--batch-dependent",
            help="Whether each row of a batch is computed from itself alone; else what is proved.",
        ),
    ] = None,
) -> None:
    """Convert an ONNX model, once, to what any xlaserve can serve."""
    # With JAX: the other commands are quicker without.
    from xlaserve.cli import import_display
    from xlaserve.models.onnx.importing import Options

    check_name("model", directory.absolute().name)
    options = Options(
        version=version,
        max_batch_size=max_batch_size,
        dimensions=_pairs("--dim", dim, int),
        shapes=_pairs("--shape", shape, _sizes),
        outputs=tuple(output or ()),
        check=check,
        tolerance=tolerance,
        limit_bytes=limit_bytes,
        batch_independent=batch_independent,
    )
    try:
        with unwinding_on_signals():
            path = import_display.run(model, directory.absolute(), options)
            recorded.record(path, for_target)
    except FileExistsError as error:
        raise InvalidModel(f"{error}; --version takes another number") from error


def _pairs(
    flag: str, texts: Sequence[str] | None, read: Callable[[str], _Value]
) -> dict[str, _Value]:
    found = {}
    for text in texts or ():
        # Names may contain the sign, sizes do not.
        name, _, value = text.rpartition("=")
        try:
            found[name] = read(value)
        except ValueError:
            raise InvalidRequest(f"{flag}: expected NAME=SIZE, got '{text}'") from None
    return found


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
