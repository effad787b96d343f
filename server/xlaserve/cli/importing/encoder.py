"""`xlaserve import` of an encoder: a version directory of a model of embeddings."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from xlaserve.cli.sizes import format_bytes
from xlaserve.errors import InvalidRequest
from xlaserve.importers.huggingface.encoders.importing import TOKENS, import_encoder
from xlaserve.runtime.devices import device

_SHOWN = 4


def run(
    source: Path,
    directory: Path,
    version: int | None,
    max_batch_size: int | None,
    dimensions: Mapping[str, Sequence[int]],
) -> None:
    """Import an encoder, and describe it; raises InvalidRequest for other dimensions."""
    for name in dimensions:
        if name != TOKENS:
            raise InvalidRequest(f"--dim: expected {TOKENS}, which an encoder has, got '{name}'")
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
        typer.echo(f"left out, since no embedding needs it: {shown}{more}")
    typer.echo(f"beside it: {', '.join(made.files) or 'no files of a tokenizer'}")
