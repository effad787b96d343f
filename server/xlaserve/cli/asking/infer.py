"""`xlaserve infer`: one inference from the shell, against any V2 server."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer
from rich.console import Console

from xlaserve.bench.inputs import make_inputs
from xlaserve.cli.asking import infer_display
from xlaserve.cli.asking.advice import advised
from xlaserve.cli.asking.connection import Reach, ask_server, reaching
from xlaserve.dialing.interface import InferenceResult, ModelTensors, asked
from xlaserve.errors import InvalidRequest, UnknownTensor
from xlaserve.serving.inference import RequestedOutput
from xlaserve.serving.inputs.output_forms import CLASSES
from xlaserve.tensors import BYTES, Tensor, TensorSpec, from_elements

_MOST_ELEMENTS = 100_000
_MOST_CLASSES = 100
"""Maximum number of classes to request, and of scores per row: servers limit both."""
_TOP = 3
"""Number of classes to show if their labels are known."""


@reaching(30.0)
def infer(  # noqa: PLR0917, typer reads the parameters of a command from its signature
    reach: Reach,
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    image: Annotated[
        Path | None, typer.Option(help="A JPEG or PNG for the model's only input.")
    ] = None,
    input_values: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="NAME=JSON (x=[[1,2]]), NAME=@FILE.npy, NAME=zeros or NAME=random; repeatable.",
        ),
    ] = None,
    model_version: Annotated[
        str, typer.Option("--version", help="Defaults to the newest version.")
    ] = "",
    classes: Annotated[
        int | None,
        typer.Option("--classes", min=1, help="Show this many classes with the highest scores."),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option("--labels", help="A file with one class name per line."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the outputs to an .npz file.")
    ] = None,
) -> None:
    """Run one inference and print the values of the outputs."""
    values = dict(_split(text) for text in input_values or ())
    names = _labels(labels)
    # No server-side classification if labels are given, or if all values are wanted.
    most = 0 if names or as_json or output else classes or _TOP
    question = _Question(model, model_version, image, values, most, only_labelled=not classes)
    result, specs = ask_server(_ask(reach, question))
    if output is not None:
        infer_display.write_npz(output, result)
    if as_json:
        typer.echo(infer_display.as_json(result))
    elif output is not None:
        infer_display.show_written(Console(), output, result)
    else:
        wanted = classes or (_TOP if names else 0)
        shown = infer_display.Classes(wanted, names) if wanted else None
        infer_display.show(Console(), result, shown, specs)


def _labels(path: Path | None) -> Sequence[str]:
    if path is None:
        return ()
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"--labels: '{path}' cannot be read: {error}") from error


def _split(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise InvalidRequest(
            f"--input: expected NAME=JSON, NAME=@FILE.npy, NAME=zeros or NAME=random, got '{text}'"
        )
    return name, value


@dataclass(frozen=True, slots=True)
class _Question:
    model: str
    version: str
    image: Path | None
    values: Mapping[str, str]
    classes: int
    """Number of classes to request for each output of scores; 0 for none."""
    only_labelled: bool
    """Whether to request classes only for outputs that have labels."""


Classified: TypeAlias = Mapping[str, TensorSpec]
"""Outputs for which classes were requested, from the server's metadata."""


async def _ask(reach: Reach, question: _Question) -> tuple[InferenceResult, Classified]:
    async with reach.dial() as client:
        asking = client.tensors(question.model, question.version)
        tensors = await advised(client, question.model, asking)
        classified = _to_classify(question, tensors)
        request = asked(question.model, question.version, _inputs(question, tensors.inputs))
        if classified:
            request.outputs = tuple(
                RequestedOutput(
                    spec.name, {CLASSES: question.classes} if spec.name in classified else {}
                )
                for spec in tensors.outputs
            )
        return await client.ask(request), classified


def _to_classify(question: _Question, tensors: ModelTensors) -> Classified:
    if not 0 < question.classes <= _MOST_CLASSES:
        return {}
    return {
        spec.name: spec
        for spec in tensors.outputs
        if spec.datatype.is_number
        and spec.shape
        and prod(map(abs, spec.shape)) <= _MOST_ELEMENTS
        and (spec.name in tensors.labelled or not question.only_labelled)
    }


def _inputs(question: _Question, specs: Sequence[TensorSpec]) -> list[tuple[TensorSpec, Tensor]]:
    known = {spec.name for spec in specs}
    for name in question.values:
        if name not in known:
            raise UnknownTensor(question.model, "input", name, sorted(known))
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
        return _loaded(spec, text[1:])
    if text in _FILLED:
        return _FILLED[text](spec)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(
            f"input '{spec.name}': expected JSON, such as [[1,2]], @FILE.npy, zeros or random, got "
            f"{text[:80]!r} ({error})"
        ) from error
    shape = np.array(value, dtype=object).shape
    return from_elements(spec.datatype, shape, _flatten(spec, value))


def _zeros(spec: TensorSpec) -> Tensor:
    made = np.zeros(_one_row(spec), spec.datatype.dtype)
    if spec.datatype is BYTES:
        made[...] = b""
    return made


def _random(spec: TensorSpec) -> Tensor:
    ((_, made),) = make_inputs("", [spec], {spec.name: _one_row(spec)}, 1)
    return made


def _one_row(spec: TensorSpec) -> tuple[int, ...]:
    """Return an input's shape with its variable dimensions set to 1."""
    return tuple(abs(size) for size in spec.shape)


_FILLED: Mapping[str, Callable[[TensorSpec], Tensor]] = MappingProxyType(
    {"zeros": _zeros, "random": _random}
)
"""Generated values by name; variable dimensions become 1."""


def _loaded(spec: TensorSpec, path: str) -> Tensor:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidRequest(f"input '{spec.name}': '{path}' cannot be read: {error}") from error
    if not isinstance(found, np.ndarray):
        found.close()
        raise InvalidRequest(f"input '{spec.name}': expected one array, got '{path}' with several")
    return found


def _flatten(spec: TensorSpec, value: Any) -> list[Any]:
    if isinstance(value, list):
        return [element for part in value for element in _flatten(spec, part)]
    return [value.encode() if spec.datatype is BYTES and isinstance(value, str) else value]
