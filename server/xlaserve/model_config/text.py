"""Reads a model configuration from a text or from the model's directory."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import betterproto

from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.json_form import read_json
from xlaserve.model_config.message import config_of
from xlaserve.model_config.pbtxt import read_pbtxt
from xlaserve.model_config.schema import BadConfig, Schema, schema_of
from xlaserve_proto import inference

LIMIT_BYTES = 1 << 20
"""Maximum size of a configuration."""

_Reader: TypeAlias = Callable[[str, Schema], betterproto.Message]

_READERS: Mapping[str, _Reader] = MappingProxyType(
    {"config.json": read_json, "config.pbtxt": read_pbtxt}
)

CONFIG_FILES: tuple[str, ...] = tuple(_READERS)
"""Configuration file names in a model's directory."""


def parse_json(
    text: str | bytes, *, limit_bytes: int = LIMIT_BYTES, source: str = "config"
) -> ModelConfig:
    """Parse a configuration in proto-JSON; `source` names it in errors."""
    return _parse(read_json, text, limit_bytes, source)


def parse_pbtxt(
    text: str | bytes, *, limit_bytes: int = LIMIT_BYTES, source: str = "config"
) -> ModelConfig:
    """Parse a configuration in protobuf's text format; `source` names it in errors."""
    return _parse(read_pbtxt, text, limit_bytes, source)


def read_config(
    directory: Path, *, limit_bytes: int = LIMIT_BYTES, roots: Roots = ANYWHERE
) -> ModelConfig:
    """Read `config.json` or `config.pbtxt` from a model's directory, or return the default.

    Raises InvalidModel if both exist, or if the file is unreadable or outside the roots.
    """
    # A dangling link or unreadable file must be an error, not count as absent.
    found = [name for name in _READERS if os.path.lexists(directory / name)]
    if not found:
        return ModelConfig()
    if len(found) > 1:
        raise InvalidModel(f"expected one of {' and '.join(found)}, got both")
    (name,) = found
    try:
        data = _contents(directory / name, limit_bytes, roots)
    except OSError as error:
        raise InvalidModel(f"{name}: cannot be read, {error.strerror}") from None
    return _parse(_READERS[name], data, limit_bytes, name)


def _contents(path: Path, limit_bytes: int, roots: Roots) -> bytes:
    with roots.open(path) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(size, limit_bytes, path.name)
        return bytes(files.read_exactly(file, size, path.name))


def _parse(reader: _Reader, text: str | bytes, limit_bytes: int, source: str) -> ModelConfig:
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    _check_size(len(data), limit_bytes, source)
    try:
        message = reader(data.decode(), schema_of(inference.ModelConfig))
        assert isinstance(message, inference.ModelConfig)
        return config_of(message)
    except UnicodeDecodeError as error:
        raise InvalidModel(f"{source}: expected UTF-8, got another byte at {error.start}") from None
    except BadConfig as problem:
        raise InvalidModel(f"{source}: {problem}") from None


def _check_size(size: int, limit_bytes: int, source: str) -> None:
    if size > limit_bytes:
        raise InvalidModel(f"{source}: expected at most {limit_bytes} bytes, got {size}")
