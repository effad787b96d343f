"""`xlaserve import`: makes a version directory from ONNX, a .pt2 file or a language model."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from xlaserve.cli.offline import recorded
from xlaserve.cli.pairs import pairs_of, sizes_of
from xlaserve.cli.rows import Independence
from xlaserve.cli.termination import unwinding_on_signals
from xlaserve.errors import InvalidModel, InvalidRequest
from xlaserve.residence.repository.names import check_name


def import_onnx(  # noqa: PLR0917, typer reads the parameters of a command from its signature
    context: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(
            help="The ONNX file, the .pt2 file of torch.export, or a directory of Hugging Face "
            "with config.json: a language model, or an encoder for embeddings."
        ),
    ],
    directory: Annotated[Path, typer.Argument(help="The model's directory: REPOSITORY/NAME.")],
    version: Annotated[
        int | None, typer.Option(help="Number of the version directory; the next one by default.")
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Maximum rows per request; defaults to 32 if every input has a dynamic"
            " first dimension, otherwise 0."
        ),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(
            "--dim", help="NAME=SIZE or NAME=16,32: sizes of a dynamic dimension; may be repeated."
        ),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            help="INPUT=-1,3,224,224: replaces the input's shape; may be repeated.",
        ),
    ] = None,
    const: Annotated[
        list[str] | None,
        typer.Option(
            "--const",
            help="INPUT=NUMBER or INPUT=N,N,...: makes the input a constant; may be repeated.",
        ),
    ] = None,
    batch_axis: Annotated[
        list[str] | None,
        typer.Option(
            "--batch-axis",
            help="TENSOR=1: the batch axis of an input or output; may be repeated.",
        ),
    ] = None,
    output: Annotated[
        list[str] | None, typer.Option("--output", help="An output to keep; all by default.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare the outputs with onnxruntime.")
    ] = True,
    tolerance: Annotated[
        float, typer.Option(help="Allowed difference of an output, relative to its largest value.")
    ] = 1e-4,
    limit_bytes: Annotated[
        int, typer.Option(help="Maximum bytes of the model and its external data.")
    ] = 8 * 2**30,
    labels: Annotated[
        Path | None, typer.Option(help="A file with one class name per line.")
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="Factor for the pixel values of images, such as 0.00392157.")
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="Mean to subtract after scaling, such as 0.485,0.456,0.406.")
    ] = None,
    std: Annotated[
        str | None, typer.Option(help="Standard deviation to divide by, such as 0.229,0.224,0.225.")
    ] = None,
    resize: Annotated[
        str | None, typer.Option(help="How images are resized: stretch, pad, crop or crop:256.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="int8 or int4 for the matrices of a language model; unquantized by default."
        ),
    ] = None,
    for_target: recorded.Targets = None,
    batch_independent: Independence = None,
) -> None:
    """Convert an ONNX or PyTorch model, or a language model, to an xlaserve model."""
    # These import JAX, which would slow down the other commands.
    from xlaserve.cli.importing import display
    from xlaserve.importers.onnx.importing import Options
    from xlaserve.importers.pt2.importing import SUFFIX
    from xlaserve.importers.pt2.importing import Options as PytorchOptions

    check_name("model", directory.absolute().name)
    if model.is_dir():
        if _is_encoder(context, model):
            with _said(), unwinding_on_signals():
                sizes = pairs_of("--dim", dim, sizes_of)
                _import_encoder(model, directory.absolute(), version, max_batch_size, sizes)
            return
        _import_language(context, model, directory.absolute(), version, weights)
        return
    _refuse(context, {"weights"}, f"is for language models, and '{model}' is a file")
    dimensions = pairs_of("--dim", dim, sizes_of)
    parameters = _of_images(resize, scale=scale, mean=mean, std=std)
    if model.suffix == SUFFIX:
        _refuse(context, _OF_ONNX, f"is for ONNX files, and '{model}' is a .pt2 file")
        program = PytorchOptions(
            version=version,
            max_batch_size=max_batch_size,
            dimensions=dimensions,
            outputs=tuple(output or ()),
            limit_bytes=limit_bytes,
            labels=_lines_of(labels),
            parameters=parameters,
            batch_independent=batch_independent,
        )
        with _said(), unwinding_on_signals():
            path = display.run_program(model, directory.absolute(), program)
            recorded.record(path, for_target)
        return
    options = Options(
        version=version,
        max_batch_size=max_batch_size,
        dimensions=dimensions,
        shapes=pairs_of("--shape", shape, _shape),
        constants=pairs_of("--const", const, _texts, "INPUT=NUMBER"),
        batch_axes=pairs_of("--batch-axis", batch_axis, _axis, "TENSOR=DIMENSION"),
        outputs=tuple(output or ()),
        check=check,
        tolerance=tolerance,
        limit_bytes=limit_bytes,
        labels=_lines_of(labels),
        parameters=parameters,
        batch_independent=batch_independent,
    )
    with _said(), unwinding_on_signals():
        path = display.run_onnx(model, directory.absolute(), options)
        recorded.record(path, for_target)


@contextmanager
def _said() -> Iterator[None]:
    """Add advice to the error for an existing version."""
    try:
        yield
    except FileExistsError as error:
        raise InvalidModel(f"{error}; --version takes another number") from error


_OF_ONNX = frozenset({"shape", "const", "batch_axis", "check", "tolerance"})
"""Parameters that do not apply to PyTorch programs."""

_OF_LANGUAGE = frozenset({"model", "directory", "version", "weights"})
"""Parameters that apply to language models."""


_SHOWN = 4
"""Maximum number of omitted tensors to list."""

_OF_ENCODERS = frozenset({"model", "directory", "version", "max_batch_size", "dim"})
"""Parameters that apply to encoders."""


def _is_encoder(context: typer.Context, source: Path) -> bool:
    """Tell whether a directory contains an encoder; raises InvalidRequest for other options."""
    from xlaserve.importers.huggingface.config_json import CONFIG
    from xlaserve.importers.huggingface.encoders import configuration

    if not (source / CONFIG).is_file() or not configuration.is_encoder(source):
        return False
    _refuse(
        context, context.params.keys() - _OF_ENCODERS, f"has no effect: '{source}' is an encoder"
    )
    return True


def _import_encoder(
    source: Path,
    directory: Path,
    version: int | None,
    max_batch_size: int | None,
    dimensions: Mapping[str, Sequence[int]],
) -> None:
    """Import an encoder and print the result; raises InvalidRequest for unknown dimensions."""
    from xlaserve.cli.sizes import format_bytes
    from xlaserve.importers.huggingface.encoders.importing import TOKENS, import_encoder
    from xlaserve.runtime.devices import device

    for name in dimensions:
        if name != TOKENS:
            raise InvalidRequest(
                f"--dim: expected '{TOKENS}', the only dynamic dimension of an encoder, got"
                f" '{name}'"
            )
    device.start("cpu")
    made = import_encoder(source, directory, version, max_batch_size, dimensions.get(TOKENS))
    form = made.form
    length = " of length 1" if form.is_normalised else ""
    typer.echo(
        f"{made.path}: {form.layers} layers of {form.hidden}, embeddings of {form.size}{length} "
        f"({', '.join(form.poolings)}), compiled for {', '.join(map(str, made.lengths))} tokens, "
        f"parameters of {format_bytes(made.parameters_bytes)} in {made.dtype}"
    )
    if made.left_out:
        shown = ", ".join(made.left_out[:_SHOWN])
        more = " and others" if len(made.left_out) > _SHOWN else ""
        typer.echo(f"omitted, since embeddings do not need it: {shown}{more}")
    typer.echo(f"also copied: {', '.join(made.files) or 'no tokenizer files'}")


def _import_language(
    context: typer.Context,
    source: Path,
    directory: Path,
    version: int | None,
    weights: str | None,
) -> None:
    """Import a Hugging Face directory; raises InvalidRequest for an ONNX option."""
    from xlaserve.cli.sizes import format_bytes
    from xlaserve.importers.huggingface.config_json import CONFIG
    from xlaserve.importers.huggingface.importing import import_checkpoint
    from xlaserve.importers.huggingface.quantising import KINDS
    from xlaserve.runtime.devices import device

    if not (source / CONFIG).is_file():
        raise InvalidRequest(
            f"'{source}': expected an ONNX or .pt2 file, or a directory with {CONFIG}"
        )
    refused = context.params.keys() - _OF_LANGUAGE
    _refuse(context, refused, f"is for ONNX files, and '{source}' is a directory")
    if weights is not None and weights not in KINDS:
        raise InvalidRequest(f"--weights: expected one of {', '.join(KINDS)}, got '{weights}'")
    device.start("cpu")
    with _said(), unwinding_on_signals():
        made = import_checkpoint(source, directory, version, weights)
    form = made.form
    typer.echo(
        f"{made.path}: {len(form.windows)} layers of {form.hidden}, {form.vocab} tokens, "
        f"{form.max_length} positions, parameters of {format_bytes(made.parameters_bytes)} in "
        f"{made.dtype}"
    )
    if made.agreement is not None:
        typer.echo(
            f"{weights}: {made.parameters_bytes / made.checkpoint_bytes:.0%} of the checkpoint's "
            f"{format_bytes(made.checkpoint_bytes)}; after {made.agreement.tokens} random tokens"
            f" the logits differ by {made.agreement.off:.2%} of their spread, and the likeliest "
            f"token is the same after {made.agreement.same:.0%}"
        )
    typer.echo(f"also copied: {', '.join(made.files) or 'no tokenizer files'}")


def _refuse(context: typer.Context, names: AbstractSet[str], reason: str) -> None:
    """Raise InvalidRequest if any of these options is given."""
    for name in context.params:
        found = context.get_parameter_source(name)
        if name in names and found is not None and found.name == "COMMANDLINE":
            raise InvalidRequest(f"--{name.replace('_', '-')} {reason}")


def _shape(text: str) -> tuple[int | str, ...]:
    """Parse a shape: sizes, and names of dimensions whose sizes `--dim` lists."""
    return tuple(_size(item.strip()) for item in text.split(","))


def _size(text: str) -> int | str:
    return text if text.isidentifier() else int(text)


def _texts(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _axis(text: str) -> int:
    axis = int(text)
    if axis < 0:
        raise ValueError
    return axis


def _lines_of(labels: Path | None) -> tuple[str, ...]:
    if labels is None:
        return ()
    try:
        return tuple(labels.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--labels: '{labels}' cannot be read: {error}") from error


def _of_images(resize: str | None, **numbers: str | None) -> dict[str, str]:
    """Return the configuration parameters that describe the model's image preprocessing."""
    found = {}
    for name, text in numbers.items():
        if text is not None:
            found[f"image_{name}"] = _numbers(f"--{name}", text)
    if resize is not None:
        kind, _, shorter = resize.partition(":")
        if kind not in _RESIZES or (shorter and (kind != "crop" or not shorter.isdecimal())):
            known = ", ".join(_RESIZES)
            raise InvalidRequest(f"--resize: expected one of {known}, or crop:256, got '{resize}'")
        found["image_resize"] = kind
        if shorter:
            found["image_resize_to"] = shorter
    return found


_RESIZES = ("stretch", "crop", "pad")


def _numbers(flag: str, text: str) -> str:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(map(isfinite, numbers)):
        raise InvalidRequest(f"{flag}: expected comma-separated numbers, got '{text}'")
    return text
