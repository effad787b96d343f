"""Reads an encoder's parameters from memory-mapped safetensors files, without copies."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xlaserve.errors import InvalidModel
from xlaserve.importers.huggingface import checkpoint
from xlaserve.importers.huggingface.encoders.families import EncoderFamily
from xlaserve.importers.huggingface.encoders.form import EncoderForm
from xlaserve.importers.huggingface.form import Stored
from xlaserve.tensors import Tensor, describe

_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_DERIVED = ("position_ids", "token_type_ids")
"""Suffixes of tensors in older checkpoints that can be derived from config.json."""


def read(
    directory: Path, form: EncoderForm, family: EncoderFamily
) -> tuple[dict[str, Any], Sequence[str]]:
    """Return the parameters that `forward` takes, and the names of unused tensors.

    The unused tensors are those of heads. Raises InvalidModel for other unknown tensors and for
    missing ones.
    """
    tensors = {
        name.removeprefix(family.prefix): array
        for name, array in checkpoint.tensors_of(directory).items()
    }
    params: dict[str, Any] = {
        one.role: _pop_tensor(tensors, one, one.name, form) for one in form.ends
    }
    params["layers"] = [
        {
            one.role: _pop_tensor(tensors, one, f"{form.layer_name}.{number}.{one.name}", form)
            for one in form.layer
        }
        for number in range(form.layers)
    ]
    left = sorted(name for name in tensors if not name.endswith(_DERIVED))
    extra = [name for name in left if not name.startswith(family.heads)]
    if extra:
        first = tensors[extra[0]]
        raise InvalidModel(
            f"tensor '{extra[0]}' {describe(first.dtype.name, first.shape)} and {len(extra) - 1} "
            "more are in the checkpoint, but config.json does not describe their use"
        )
    _check_dtypes(params)
    return params, left


def _pop_tensor(tensors: dict[str, Tensor], stored: Stored, name: str, form: EncoderForm) -> Tensor:
    shape = tuple(form.sizes[size] for size in stored.shape)
    array = tensors.pop(name, None)
    if array is None or array.shape != shape:
        got = "none" if array is None else str(list(array.shape))
        raise InvalidModel(
            f"tensor '{name}': expected shape {list(shape)}, the checkpoint has {got}"
        )
    if array.dtype.name not in _DTYPES:
        known = ", ".join(sorted(_DTYPES))
        raise InvalidModel(f"tensor '{name}': expected one of {known}, got {array.dtype.name}")
    return array


def _check_dtypes(params: dict[str, Any]) -> None:
    """Raise InvalidModel unless all parameters have the dtype of the embedding."""
    wanted = params["embedding"].dtype
    ends = {role: array for role, array in params.items() if role != "layers"}
    for among in (ends, *params["layers"]):
        for role, array in among.items():
            if array.dtype != wanted:
                raise InvalidModel(
                    f"tensor '{role}': expected {wanted.name} like the embedding, got "
                    f"{array.dtype.name}"
                )
