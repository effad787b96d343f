"""Tokenizer files in a model directory, read with size limits and validated."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from xlaserve.errors import InvalidModel

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"

LIMITS = {TOKENIZER: 128 << 20, CONFIG: 16 << 20, GENERATION: 1 << 20, TEMPLATE: 1 << 20}
"""Maximum size of each file in bytes."""

Open: TypeAlias = Callable[[Path], BinaryIO]
"""Opens a regular file for reading; raises OSError, or InvalidModel for a forbidden path."""


def open_plain(path: Path) -> BinaryIO:
    """Open a file without restrictions on its location."""
    return path.open("rb")


def read(folder: Path, name: str, opened: Open) -> bytes | None:
    """Return the contents of a file, or None if it does not exist; raises InvalidModel."""
    limit = LIMITS[name]
    try:
        with opened(folder / name) as file:
            data = file.read(limit + 1)
            # Reading an unbuffered file may return less than requested.
            while 0 < len(data) <= limit and (more := file.read(limit + 1 - len(data))):
                data += more
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidModel(f"{name} cannot be read: {error.strerror or error}") from error
    if len(data) > limit:
        raise InvalidModel(f"{name} has more than the {limit} bytes allowed")
    return data


def parse_text(name: str, data: bytes) -> str:
    """Decode a text file; raises InvalidModel."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidModel(f"{name} is not UTF-8: {error}") from None


def parse_object(name: str, data: bytes | bytearray) -> Mapping[str, Any]:
    """Parse a JSON file that contains an object; raises InvalidModel."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{name} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidModel(f"{name}: expected an object, got {type(found).__name__}")
    return found
