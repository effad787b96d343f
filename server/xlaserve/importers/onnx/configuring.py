"""Writes the config.pbtxt and label file of an imported model."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from xlaserve.artifact.manifest import Manifest
from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.labels import Labels
from xlaserve.tensors import TensorSpec

FILE_NAME = "labels.txt"
CONFIG_NAME = "config.pbtxt"
_CHANNELS = (1, 3, 4)
NONE: Mapping[str, str] = MappingProxyType({})


def write(
    directory: Path, described: Manifest, labels: Labels, parameters: Mapping[str, str] = NONE
) -> str:
    """Write the label file and a config.pbtxt with `parameters` to the model's directory.

    Return a message for the user. Existing files are not changed; if they differ, the message says
    what to add to them.
    """
    found = {spec.name: spec for spec in described.outputs if _fits(spec, labels)}
    if not found and not parameters:
        return ""
    notes, to_add = [], []
    if found:
        shown = ", ".join(f"'{name}'" for name in found)
        notes.append(f"class names of {shown} are in {FILE_NAME}, one per line")
        text = "\n".join(labels[next(iter(found))]) + "\n"
        if not _put(directory / FILE_NAME, text):
            return f"{notes[0]}, but a different {FILE_NAME} exists; write them to another file"
        to_add.append(f'label_filename: "{FILE_NAME}" to these outputs')
    if parameters:
        shown = ", ".join(f"{name} {value}" for name, value in parameters.items())
        notes.append(f"images are preprocessed with {shown}")
        to_add.append("these parameters")
    if not _put(directory / CONFIG_NAME, "\n".join(_lines(described, found, parameters)) + "\n"):
        return f"{'; '.join(notes)}; add {' and '.join(to_add)} to the existing {CONFIG_NAME}"
    return "; ".join(notes)


def named(described: Manifest, classes: Sequence[str]) -> Labels:
    """Return the outputs that have a score per class; raises InvalidModel if there are none."""
    found = {
        spec.name: tuple(classes)
        for spec in described.outputs
        if spec.shape[-1:] == (len(classes),) and spec.datatype.dtype.kind in "fV"
    }
    if not found:
        shown = ", ".join(f"'{spec.name}' {spec}" for spec in described.outputs)
        raise InvalidModel(
            f"labels: got {len(classes)}, but no output has that many classes, only {shown}"
        )
    return found


def _fits(spec: TensorSpec, labels: Labels) -> bool:
    """Tell whether an output is a class index, or has a column per class."""
    of = labels.get(spec.name, ())
    return bool(of) and (spec.datatype.name == "INT64" or spec.shape[-1:] == (len(of),))


def _put(path: Path, text: str) -> bool:
    """Write a file if it does not exist; return False if it exists with other contents."""
    try:
        with path.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
    except FileExistsError:
        return path.is_file() and path.read_bytes() == text.encode()
    return True


def _lines(
    described: Manifest, labelled: Mapping[str, TensorSpec], parameters: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines of the config.pbtxt."""
    yield f"max_batch_size: {described.max_batch_size}"
    for key, value in parameters.items():
        shown = f"{{ string_value: {json.dumps(value)} }}"
        yield f"parameters {{ key: {json.dumps(key)} value: {shown} }}"
    for spec in described.inputs if parameters else ():
        # ONNX operators expect channels first, regardless of the sizes.
        if len(spec.shape) == len("NCHW") and spec.shape[1] in _CHANNELS:
            dims = ", ".join(map(str, _shape(described, spec)))
            prefix = f"name: {json.dumps(spec.name)} data_type: {spec.datatype.config_name}"
            yield f"input {{ {prefix} dims: [ {dims} ] format: FORMAT_NCHW }}"
    for spec in described.outputs if labelled else ():
        dims = ", ".join(map(str, _shape(described, spec)))
        label = f' label_filename: "{FILE_NAME}"' if spec.name in labelled else ""
        # JSON string escapes are valid in protobuf's text format, as `dumps` escapes non-ASCII.
        name, kind = json.dumps(spec.name), spec.datatype.config_name
        yield f"output {{ name: {name} data_type: {kind} dims: [ {dims} ]{label} }}"


def _shape(described: Manifest, spec: TensorSpec) -> Sequence[int]:
    """Return the dims of a tensor for config.pbtxt, which omits the batch."""
    return spec.shape[1:] if described.max_batch_size else spec.shape
