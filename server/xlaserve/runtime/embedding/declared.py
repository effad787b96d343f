"""The declaration that makes a model an embedding model: a parameter or a file.

    parameters { key: "embeddings" value { string_value: '{"dimensions": [256, 128]}' } }

`embeddings.json` in the version directory contains the same object. The parameter takes precedence,
and may be `false`.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS, TextLimits
from xlaserve.language.tokenizing import Tokens
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.embedding import text_files
from xlaserve.runtime.embedding.text_files import TextFiles

FILE_NAME = "embeddings.json"
PARAMETER = "embeddings"
LIMIT_BYTES = 64 << 10

_DEFAULTS = {"true": "{}", "false": ""}


class Declaration(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """Fields of the declaration; all are optional if the tensors imply them."""

    tokens: str = ""
    """Name of the input for token ids; may be empty if `mask` and `types` are all other inputs."""
    mask: str = ""
    """Name of the input for the attention mask; by default `attention_mask`, if there is one."""
    types: str = ""
    """Name of an input to fill with zeros; defaults to `token_type_ids`, if the model has it."""
    output: str = ""
    """Name of the output; may be empty if the model has only one."""
    max_tokens: int | None = None
    """Maximum number of tokens per input; None for the largest compiled length."""
    vocab: int | None = None
    """Vocabulary size, or None to accept any token id."""
    pad: int = 0
    dimensions: bool | list[int] = False
    """Sizes to which clients may truncate an embedding; `true` for any size."""
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Declared:
    """A declaration together with its model's tokenizer."""

    declaration: Declaration
    place: str
    """Where the declaration is, for error messages."""
    text: Tokens | None = None
    no_text: str = ""
    written_at: int = 0
    files: TextFiles | None = None
    """The files that `text` was read from, or None without a tokenizer."""


def read(
    path: Path,
    config: ModelConfig,
    model: str,
    roots: Roots = ANYWHERE,
    limits: TextLimits = DEFAULT_TEXT_LIMITS,
) -> Declared | None:
    """Return a version's embedding declaration, or None if it has none.

    An unusable tokenizer is only logged: clients can still send token ids.
    """
    written, place = config.parameters.get(PARAMETER), f"parameter '{PARAMETER}'"
    if written is None:
        if not (path / FILE_NAME).exists():
            return None
        place = FILE_NAME
        data = files.read_checked(path, FILE_NAME, limit_bytes=LIMIT_BYTES, roots=roots)
        found = parse(bytes(data), place)
    else:
        text = _DEFAULTS.get(written.strip().lower(), written)
        if not text:
            return None
        found = parse(text.encode(), place)
    loaded_text, no_text = text_files.read(path, model, roots, limits), ""
    if loaded_text.problem:
        no_text = f"has no text support ({loaded_text.problem})"
        structlog.get_logger("embeddings").warning(
            "embedding model without text support", model=model, reason=loaded_text.problem
        )
    written_at = int(path.stat().st_mtime)
    return Declared(found, place, loaded_text.tokens, no_text, written_at, loaded_text.files)


def parse(text: bytes, place: str) -> Declaration:
    """Parse a declaration; raises InvalidModel that names its `place`."""
    try:
        found = msgspec.json.decode(text, type=Declaration)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidModel(f"{place}: expected true, false, or an object of it: {error}") from None
    counts = {"max_tokens": found.max_tokens, "vocab": found.vocab}
    for name, count in counts.items():
        if count is not None and not 1 <= count <= _MOST:
            raise InvalidModel(f"{place}: {name}: expected 1 to {_MOST}, got {count}")
    if not 0 <= found.pad < (found.vocab or _MOST):
        expected = f"a token id of 0 to {(found.vocab or _MOST) - 1}"
        raise InvalidModel(f"{place}: pad: expected {expected}, got {found.pad}")
    return found


_MOST = (1 << 31) - 1
