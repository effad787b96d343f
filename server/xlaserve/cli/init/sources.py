"""The sources that `xlaserve init` accepts, and the client for each resulting model."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from xlaserve.cli.importing import packaged
from xlaserve.cli.importing.command import import_onnx
from xlaserve.cli.init import client
from xlaserve.errors import InvalidModel, InvalidReference, InvalidRequest

_PACKAGE = "pkg:"
_IMPORTED = frozenset({".onnx", ".pt2"})
_CONFIG = "config.json"
_MOST_POSITIONS = 2048
"""Default maximum length of a request to a language model. Loading reserves the cache of all slots,
and models may support a million positions."""

_PICKLE = (
    "is a pickle, which runs code when it is read: save torch.export.export(...) as a .pt2 file"
)
_WEIGHTS = "has parameters but no computation: use `xlaserve export --params` with a function"
_TO_ONNX = "is from another framework: convert it to ONNX first"
_OF_AN_ENGINE = "is compiled for one kind of device: use the ONNX file it was built from"
_REFUSED: Mapping[str, str] = {
    ".pt": _PICKLE,
    ".pth": _PICKLE,
    ".bin": _PICKLE,
    ".ckpt": _PICKLE,
    ".pkl": "is a pickle, which runs code when it is read: convert the model to ONNX (skl2onnx)",
    ".joblib": "is a pickle, which runs code when it is read: convert the model to ONNX (skl2onnx)",
    ".safetensors": _WEIGHTS,
    ".npz": _WEIGHTS,
    ".gguf": "is a llama.cpp file: use the Hugging Face directory it was converted from",
    ".h5": _TO_ONNX,
    ".keras": _TO_ONNX,
    ".pb": _TO_ONNX,
    ".tflite": _TO_ONNX,
    ".plan": _OF_AN_ENGINE,
    ".engine": _OF_AN_ENGINE,
    ".jaxexp": "is a jax.export file: use `xlaserve adopt`",
    ".py": "names no function: expected FILE.py:NAME",
}
"""Unsupported file types, with advice."""
_INPUT = re.compile(r"([^=]+)=([A-Z0-9]+)\[([-0-9, ]*)\]")

Write = Callable[[Path, Sequence[str]], Path]


@dataclass(frozen=True, slots=True)
class Source:
    """A recognized source."""

    text: str
    """The source as the user gave it."""
    name: str
    """A name for the model."""
    write: Write
    """Writes the model to its directory with options of `xlaserve import`, and returns the version
    directory. Raises InvalidModel, InvalidRequest, and exceptions of the author's code."""


def find(text: str, inputs: Sequence[str]) -> Source:
    """Recognize a source; raises InvalidRequest for an unsupported one."""
    if text.startswith(_PACKAGE):
        return _refusing_inputs(_packaged(text), inputs)
    path = Path(text)
    if path.is_dir():
        if not (path / _CONFIG).is_file():
            raise InvalidRequest(f"--from: '{text}' is a directory without {_CONFIG}")
        return _refusing_inputs(Source(text, path.resolve().name, _import(path)), inputs)
    if path.suffix in _IMPORTED:
        if not path.is_file():
            raise InvalidRequest(f"--from: no such file '{text}'")
        return _refusing_inputs(Source(text, path.stem, _import(path)), inputs)
    if path.suffix in _REFUSED:
        raise InvalidRequest(f"--from: '{text}' {_REFUSED[path.suffix]}")
    file, _, attribute = text.rpartition(":")
    if not file or not attribute.isidentifier():
        raise InvalidRequest(
            "--from: expected FILE.py:NAME, an ONNX or .pt2 file, a directory of Hugging Face or "
            f"pkg:NAME, got '{text}'"
        )
    return Source(text, attribute, _export(text, dict(map(_input, inputs))))


def client_of(version: Path, model: str) -> str:
    """Return the source code of a client for a model; raises InvalidModel for unreadable files."""
    from xlaserve.artifact import generator_record as record
    from xlaserve.artifact import manifest

    if (version / record.FILE_NAME).is_file():
        return client.of_generator(model, record.read(version))
    return client.of_model(model, manifest.read(version))


def _refusing_inputs(source: Source, inputs: Sequence[str]) -> Source:
    if inputs:
        raise InvalidRequest(
            f"--input is only for functions: '{source.text}' declares its own inputs"
        )
    return source


def _packaged(text: str) -> Source:
    found = packaged.find(text.removeprefix(_PACKAGE))
    imported = _import(found.file)

    def _write(directory: Path, options: Sequence[str]) -> Path:
        if found.notice:
            typer.echo(found.notice, err=True)
        return imported(directory, (*found.options, *options))

    return Source(text, found.name, _write)


def _import(path: Path) -> Write:
    """Return a function that imports a file like `xlaserve import`, with its options and output."""

    def _write(directory: Path, options: Sequence[str]) -> Path:
        application = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
        application.command()(import_onnx)
        given = [*options, "--", str(path), str(directory)]
        typer.main.get_command(application).main(
            given, prog_name="xlaserve import", standalone_mode=False
        )
        version = max((each for each in directory.iterdir() if each.is_dir()), key=_number)
        _bound_positions(directory, version)
        return version

    return _write


def _number(version: Path) -> int:
    return int(version.name) if version.name.isdecimal() else 0


def _bound_positions(directory: Path, version: Path) -> None:
    """Write a configuration that limits the positions of a language model with many."""
    from xlaserve.artifact import generator_record as record

    if not (version / record.FILE_NAME).is_file():
        return
    most = record.read(version).max_length
    if most > _MOST_POSITIONS:
        (directory / "config.pbtxt").write_text(
            f"# Positions of a request, prompt and answer together; the model has {most}.\n"
            f'parameters {{ key: "length" value {{ string_value: "{_MOST_POSITIONS}" }} }}\n'
        )


def _export(reference: str, inputs: Mapping[str, tuple[str, list[int]]]) -> Write:
    def _write(directory: Path, options: Sequence[str]) -> Path:
        if options:
            raise InvalidRequest(
                f"'{options[0]}' is an option for imports, but '{reference}' is exported: leave it"
                " out"
            )
        from xlaserve.authoring.export import load_exportable

        model = _plain(reference, inputs) if inputs else None
        return (model or load_exportable(reference)).write(
            directory / "1", on_notice=lambda notice: typer.echo(notice, err=True)
        )

    _check_file(reference)
    return _write


def _check_file(reference: str) -> None:
    file = reference.rpartition(":")[0]
    suffix = Path(file).suffix
    if suffix != ".py" and ("/" in file or suffix in _REFUSED.keys() | _IMPORTED):
        raise InvalidRequest(f"--from: expected FILE.py:NAME or MODULE:NAME, got '{reference}'")


def _plain(reference: str, inputs: Mapping[str, tuple[str, list[int]]]) -> Any:
    """Return an Exportable of a function that takes only arrays."""
    from xlaserve.authoring.export import Exportable
    from xlaserve.files.references import load_reference

    try:
        function: Any = load_reference(reference)
    except InvalidReference as error:
        raise InvalidModel(str(error)) from error
    if not callable(function):
        raise InvalidModel(
            f"{reference} is a {type(function).__name__}, but --input is only for functions"
        )
    taken = list(inspect.signature(function).parameters)
    try:
        inspect.signature(function).bind(*inputs)
    except TypeError as error:
        raise InvalidModel(
            f"{reference} takes {', '.join(taken) or 'nothing'}, but --input gives "
            f"{', '.join(inputs)}: {error}"
        ) from error

    def _called(_: object, *arrays: object) -> object:
        answered = function(*arrays)
        return answered if isinstance(answered, dict) else {"y": answered}

    return Exportable(_called, None, inputs)


def _input(text: str) -> tuple[str, tuple[str, list[int]]]:
    found = _INPUT.fullmatch(text)
    try:
        name, datatype, sizes = found.groups() if found else ("", "", "none")
        return name, (datatype, [int(size) for size in sizes.split(",") if size.strip()])
    except ValueError:
        raise InvalidRequest(
            f"--input: expected NAME=DATATYPE[SIZES], for example x=FP32[-1,3], got '{text}'"
        ) from None
