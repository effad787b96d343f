"""Reads a decoder's parameters from memory-mapped safetensors files, without copies."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec
import numpy as np

from xlaserve.artifact import weights
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.importers.huggingface.config_json import CONFIG
from xlaserve.importers.huggingface.form import Form, Stored
from xlaserve.tensors import Tensor, describe

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 16 << 20
_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_HEAD = Stored("head", "lm_head.weight", ("vocab", "hidden"))


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read(directory: Path, form: Form, scratch: Path | None = None) -> dict[str, Any]:
    """Return the parameters that `forward` takes, as views of the files. Raises InvalidModel.

    Experts that are stored one by one have to be copied: they are stacked in an unnamed temporary
    file in `scratch`, by default in the system's temporary directory.
    """
    layout = form.layout
    tensors = _with_prefix(tensors_of(directory), layout.optional_prefix)
    params: dict[str, Any] = {}
    head = (_HEAD,) if not form.tied or _HEAD.name in tensors else ()
    for stored in (*layout.ends, *head):
        params[stored.role] = _pop_tensor(tensors, stored, stored.name, form)
    if form.tied and head and not np.array_equal(params.pop("head"), params["embedding"]):
        raise InvalidModel(
            f"tensor '{_HEAD.name}' differs from '{layout.ends[0].name}', although {CONFIG} ties"
            " them"
        )
    params["layers"] = [
        _layer(tensors, form, number, scratch) for number in range(len(form.windows))
    ]
    extra = sorted(name for name in tensors if not name.endswith(layout.derived))
    if extra:
        first = tensors[extra[0]]
        raise InvalidModel(
            f"tensor '{extra[0]}' {describe(first.dtype.name, first.shape)} and {len(extra) - 1} "
            f"more are in the checkpoint, but {CONFIG} does not describe their use"
        )
    _check_dtypes(params)
    return params


def _layer(
    tensors: dict[str, Tensor], form: Form, number: int, scratch: Path | None
) -> dict[str, Tensor]:
    layer: dict[str, Tensor] = {}
    prefix = f"{form.layout.layers}.{number}."
    for stored in (*form.layout.layer, *_feed_forward(tensors, form, number, prefix)):
        if "*" in stored.name:
            layer[stored.role] = _stacked(tensors, stored, prefix, form, scratch)
            continue
        array = _pop_tensor(tensors, stored, prefix + stored.name, form)
        if not stored.parts:
            layer[stored.role] = array
            continue
        ends = np.cumsum([form.sizes[size] for _, size in stored.parts])
        parts = np.split(array, ends[:-1], stored.fused_at)
        layer.update(zip((role for role, _ in stored.parts), parts, strict=True))
    return layer


def _feed_forward(
    tensors: Mapping[str, Tensor], form: Form, number: int, prefix: str
) -> tuple[Stored, ...]:
    """Return the tensors of a layer's feed-forward, in the layout that the checkpoint uses."""
    layout = form.layout
    if form.experts is None or not form.experts.layers[number]:
        return layout.feed_forward
    ways = (
        way
        for way in layout.experts
        if all(prefix + one.name.replace("*", "0") in tensors for one in way)
    )
    return next(ways, layout.experts[0])


def _stacked(
    tensors: dict[str, Tensor], stored: Stored, prefix: str, form: Form, scratch: Path | None
) -> Tensor:
    """Copy the matrices of all experts into one array backed by an unnamed temporary file."""
    count, *shape = (form.sizes[size] for size in stored.shape)
    one = replace(stored, shape=stored.shape[1:])
    stacked: Tensor | None = None
    for number in range(count):
        name = prefix + stored.name.replace("*", str(number))
        array = _pop_tensor(tensors, one, name, form)
        if stacked is None:
            with TemporaryFile(dir=scratch) as file:
                pages = np.memmap(file, np.uint8, "w+", shape=(count * array.nbytes,))
            stacked = pages.view(array.dtype).reshape(count, *shape)
        if array.dtype != stacked.dtype:
            raise InvalidModel(
                f"tensor '{name}': expected {stacked.dtype.name} like expert 0, got "
                f"{array.dtype.name}"
            )
        stacked[number] = array
    assert stacked is not None  # there is at least one expert
    return stacked


def _pop_tensor(tensors: dict[str, Tensor], stored: Stored, name: str, form: Form) -> Tensor:
    shape = tuple(form.sizes[size] for size in stored.shape)
    shape = shape[::-1] if stored.transposed else shape
    array = tensors.pop(name, None)
    if array is None:
        raise InvalidModel(
            f"tensor '{name}': expected shape {list(shape)}, the checkpoint has none"
        )
    if array.shape != shape:
        raise InvalidModel(
            f"tensor '{name}': expected shape {list(shape)}, got {list(array.shape)}"
        )
    if array.dtype.name not in _DTYPES:
        raise InvalidModel(
            f"tensor '{name}': expected one of {', '.join(sorted(_DTYPES))}, got {array.dtype.name}"
        )
    return array.T if stored.transposed else array


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    return {name if name == _HEAD.name else prefix + name: t for name, t in tensors.items()}


def _check_dtypes(params: Mapping[str, Any]) -> None:
    """Raise InvalidModel unless all parameters have the dtype of the embedding."""
    wanted = params["embedding"].dtype
    ends = {role: array for role, array in params.items() if role != "layers"}
    places = [("", ends), *((f" of layer {n}", one) for n, one in enumerate(params["layers"]))]
    for place, among in places:
        for role, array in among.items():
            if array.dtype != wanted:
                raise InvalidModel(
                    f"tensor '{role}'{place}: expected {wanted.name} like the embedding, got "
                    f"{array.dtype.name}"
                )


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a directory by name, as views of its files. Raises InvalidModel."""
    if (directory / SINGLE).exists():
        return dict(weights.read_mapped(directory, SINGLE))
    if not (directory / INDEX).exists():
        raise InvalidModel(f"'{directory}' has neither {SINGLE} nor {INDEX}")
    with files.opened(directory, INDEX, limit_bytes=_MAX_INDEX_BYTES) as (file, _):
        text = file.read(_MAX_INDEX_BYTES)
    try:
        named = msgspec.json.decode(text, type=_Index).weight_map
    except msgspec.MsgspecError as error:
        raise InvalidModel(f"{INDEX}: expected a weight_map of names: {error}") from error
    return _of_shards(directory, named)


def _of_shards(directory: Path, named: Mapping[str, str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(named.values())):
        if Path(shard).name != shard:
            raise InvalidModel(
                f"{INDEX}: expected file names in the same directory, got '{shard[:200]}'"
            )
        for name, array in weights.read_mapped(directory, shard):
            if named.get(name) != shard:
                place = named.get(name, "no file")
                raise InvalidModel(
                    f"tensor '{name}' is in {shard}, but {INDEX} has it in {place[:200]}"
                )
            tensors[name] = array
    lacking = sorted(named.keys() - tensors.keys())
    if lacking:
        place = named[lacking[0]]
        raise InvalidModel(f"tensor '{lacking[0]}' is missing from {place}, where {INDEX} has it")
    return tensors
