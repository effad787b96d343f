"""`xlaserve infer`: one inference from the shell, against any V2 gRPC server."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from xlaserve.errors import InvalidRequest
from xlaserve.tensors import (
    BYTES,
    Tensor,
    TensorSpec,
    describe,
    from_elements,
)
from xlaserve.transport.grpc.client import Client, InferenceResult

_TOP = 3
_SHOWN_ELEMENTS = 16


def infer(  # noqa: PLR0917, typer reads the parameters of a command from its signature
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    image: Annotated[
        Path | None, typer.Option(help="A JPEG or PNG for the model's only input.")
    ] = None,
    input_values: Annotated[
        list[str] | None,
        typer.Option("--input", help="NAME=JSON or NAME=@FILE.npy; may be repeated."),
    ] = None,
    model_version: Annotated[
        str, typer.Option("--model-version", help="The newest one if not given.")
    ] = "",
    url: Annotated[
        str, typer.Option(help="Where the server is: host:port or unix:path.")
    ] = "127.0.0.1:8001",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each answer.")] = 30.0,
) -> None:
    """Run one inference and print the outputs."""
    values = dict(_split(text) for text in input_values or ())
    question = _Question(model, model_version, image, values)
    result = asyncio.run(_ask(url, timeout, question))
    _show(Console(), result)


def _split(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise InvalidRequest(f"--input: expected NAME=JSON or NAME=@FILE.npy, got '{text}'")
    return name, value


@dataclass(frozen=True, slots=True)
class _Question:
    model: str
    version: str
    image: Path | None
    values: Mapping[str, str]


async def _ask(url: str, timeout: float, question: _Question) -> InferenceResult:
    async with Client(url, timeout=timeout) as client:
        specs = await client.inputs(question.model, question.version)
        inputs = _inputs(question, specs)
        return await client.infer(question.model, question.version, inputs)


def _inputs(question: _Question, specs: Sequence[TensorSpec]) -> list[tuple[TensorSpec, Tensor]]:
    if question.image is None:
        return [(spec, _read(spec, question.values.get(spec.name))) for spec in specs]
    return [(_only(question.model, specs), _encoded(question.image))]


def _only(model: str, specs: Sequence[TensorSpec]) -> TensorSpec:
    if len(specs) != 1:
        raise InvalidRequest(f"model '{model}' has {len(specs)} inputs, --image feeds exactly one")
    return specs[0]


def _encoded(image: Path) -> Tensor:
    try:
        return from_elements(BYTES, [1], [image.read_bytes()])
    except OSError as error:
        raise InvalidRequest(f"--image: '{image}' cannot be read: {error.strerror}") from error


def _read(spec: TensorSpec, text: str | None) -> Tensor:
    if text is None:
        raise InvalidRequest(f"input '{spec.name}' {spec}: give it with --input {spec.name}=...")
    if text.startswith("@"):
        return np.load(text[1:], allow_pickle=False)  # type: ignore[no-any-return]
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"input '{spec.name}': {error} in {text[:80]!r}") from error
    shape = np.array(value, dtype=object).shape
    return from_elements(spec.datatype, shape, _flatten(spec, value))


def _flatten(spec: TensorSpec, value: Any) -> list[Any]:
    if isinstance(value, list):
        return [element for part in value for element in _flatten(spec, part)]
    return [value.encode() if spec.datatype is BYTES and isinstance(value, str) else value]


def _show(console: Console, result: InferenceResult) -> None:
    console.print(
        f"{result.model} version {result.version}, {result.seconds * 1000:.1f} ms", highlight=False
    )
    for name, array in result.outputs.items():
        table = Table(title=f"{name} {describe(result.datatypes[name], array.shape)}")
        if _is_ranking(array):
            _fill_ranking(table, array[0])
        else:
            table.add_column("values")
            shown = " ".join(map(str, array.ravel()[:_SHOWN_ELEMENTS]))
            table.add_row(shown + (" ..." if array.size > _SHOWN_ELEMENTS else ""))
        console.print(table)


def _is_ranking(array: Tensor) -> bool:
    return array.ndim == 2 and array.shape[0] == 1 and array.dtype.kind == "f"


def _fill_ranking(table: Table, scores: Tensor) -> None:
    table.add_column("class", justify="right")
    table.add_column("score", justify="right")
    for index in np.argsort(scores)[::-1][:_TOP]:
        table.add_row(str(index), f"{scores[index]:.4f}")
