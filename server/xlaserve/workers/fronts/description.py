"""Serializes model descriptions for front ends, from known classes only.

Nothing is unpickled: a value is encoded as the name and fields of a class in `_CLASSES`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path, PurePath
from types import MappingProxyType, ModuleType
from typing import Any

import msgspec
import numpy as np

from xlaserve.files import roots
from xlaserve.model_config import config, sequence_batching
from xlaserve.model_config import ragged as config_ragged
from xlaserve.model_config.config import ModelConfig
from xlaserve.row_proofs import verdict
from xlaserve.runtime import loaded
from xlaserve.runtime.embedding import info as embedding_info
from xlaserve.runtime.embedding import text_files
from xlaserve.runtime.generator import info as generation_info
from xlaserve.runtime.loaded import ModelInfo, ModelMemory
from xlaserve.tensors import DATATYPES, Datatype, TensorSpec, datatype_of, from_bytes, to_bytes
from xlaserve_proto import inference

_MODULES: tuple[ModuleType, ...] = (
    *(config, config_ragged, loaded, sequence_batching, verdict),
    *(generation_info, embedding_info, text_files, roots),
)


def _classes() -> dict[str, type]:
    found: dict[str, type] = {TensorSpec.__name__: TensorSpec}
    for module in _MODULES:
        for name, one in vars(module).items():
            if isinstance(one, type) and (is_dataclass(one) or issubclass(one, Enum)):
                found[name] = one
    return found


_CLASSES: Mapping[str, type] = MappingProxyType(_classes())


class UnknownDescription(Exception):
    """A value that cannot be part of a model description."""


def described(info: ModelInfo, model_config: ModelConfig) -> bytes:
    """Serialize a model's description for front ends; raises UnknownDescription.

    Memory and compiled programs are left out, since status readings of all processes are added up.
    Tokenizers are left out because front ends read them from files.
    """
    generation = None if info.generation is None else replace(info.generation, text=None)
    embedding = None if info.embedding is None else replace(info.embedding, text=None)
    shown = replace(
        info,
        memory=ModelMemory(),
        buckets=(),
        compile_seconds=0.0,
        compiled_programs=0,
        cached_programs=0,
        shared_programs=0,
        on_demand_compilations=0,
        generation=generation,
        embedding=embedding,
    )
    return msgspec.msgpack.encode([_plain(shown), _plain(replace(model_config, warmup=()))])


def read(data: bytes) -> tuple[ModelInfo, ModelConfig]:
    """Decode the description and configuration; raises UnknownDescription."""
    info, model_config = (_made(part) for part in msgspec.msgpack.decode(data))
    if not isinstance(info, ModelInfo) or not isinstance(model_config, ModelConfig):
        raise UnknownDescription("expected a description and a configuration")
    return info, model_config


def _plain(value: Any) -> Any:
    """Convert a value for msgpack; every list begins with the kind of value it encodes."""
    if value is None or type(value) in _AS_THEY_ARE:
        return value
    for kind, name, parts in _WRITERS:
        if isinstance(value, kind):
            return [name, *parts(value)]
    name = type(value).__name__
    if _CLASSES.get(name) is not type(value):
        raise UnknownDescription(f"expected a part of a description, got {name}")
    # Computed fields are not constructor arguments.
    names = [one.name for one in fields(_CLASSES[name]) if one.init]
    return ["class", name, {name: _plain(getattr(value, name)) for name in names}]


def _plain_array(array: np.ndarray[Any, Any]) -> tuple[str, list[int], bytes]:
    datatype = datatype_of(array.dtype)
    if datatype is None:
        raise UnknownDescription(f"expected an array of a datatype of V2, got {array.dtype}")
    return datatype.name, list(array.shape), bytes(to_bytes(datatype, array))


_AS_THEY_ARE = frozenset({bool, int, float, str, bytes})

_WRITERS: Sequence[tuple[type, str, Callable[[Any], Iterable[Any]]]] = (
    (Enum, "enum", lambda value: (type(value).__name__, value.name)),
    (Datatype, "datatype", lambda value: (value.name,)),
    (np.ndarray, "array", _plain_array),
    (PurePath, "path", lambda value: (str(value),)),
    (inference.ModelConfig, "message", lambda value: (bytes(value),)),
    (tuple, "tuple", lambda value: map(_plain, value)),
    (list, "tuple", lambda value: map(_plain, value)),
    (frozenset, "set", lambda value: map(_plain, sorted(value))),
    (Mapping, "map", lambda value: ([_plain(key), _plain(of)] for key, of in value.items())),
)
"""Type, name and encoder of each kind of value; the first match applies."""


def _made(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    reader = _READERS.get(kind)
    if reader is None:
        raise UnknownDescription(f"expected a part of a description, got {kind!r}")
    return reader(parts)


def _made_class(parts: Sequence[Any]) -> Any:
    name, content = parts
    return _known(name)(**{field: _made(value) for field, value in content.items()})


def _known(name: str) -> Any:
    if name not in _CLASSES:
        raise UnknownDescription(f"expected a class of descriptions, got {name!r}")
    return _CLASSES[name]


_READERS: Mapping[str, Callable[[Sequence[Any]], Any]] = MappingProxyType(
    {
        "enum": lambda parts: _known(parts[0])[parts[1]],
        "datatype": lambda parts: DATATYPES[parts[0]],
        "array": lambda parts: from_bytes(DATATYPES[parts[0]], tuple(parts[1]), parts[2]),
        "path": lambda parts: Path(parts[0]),
        # Safe to parse: these bytes are the engine's own configuration, not a client's.
        "message": lambda parts: inference.ModelConfig().parse(parts[0]),
        "tuple": lambda parts: tuple(map(_made, parts)),
        "set": lambda parts: frozenset(map(_made, parts)),
        "map": lambda parts: MappingProxyType({_made(key): _made(of) for key, of in parts}),
        "class": _made_class,
    }
)
"""Decoders by name of the kind."""
