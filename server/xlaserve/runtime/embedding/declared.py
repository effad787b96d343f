"""The declaration that a model gives embeddings: a parameter of its configuration, or a file.

    parameters { key: "embeddings" value { string_value: '{"dimensions": [256, 128]}' } }

`embeddings.json` in the version directory has the same object; the parameter counts where both are
there, and may be `false`.
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
    """The input of token ids; empty for the only remaining one."""
    mask: str = ""
    """Name of the attention mask's input; empty for `attention_mask`, if the model has it."""
    types: str = ""
    """Name of an input to fill with zeros; empty for `token_type_ids`, if the model has it."""
    output: str = ""
    """The output. Empty for the only one."""
    max_tokens: int | None = None
    """None for the largest compiled size."""
    vocab: int | None = None
    """None if ids are not checked."""
    pad: int = 0
    dimensions: bool | list[int] = False
    """Sizes to which an embedding may be cut; `true` for any."""
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Declared:
    """A declaration, and its model's tokenizer."""

    said: Declaration
    place: str
    """Its source, for the text of errors."""
    text: Tokens | None = None
    no_text: str = ""
    written_at: int = 0
    files: TextFiles | None = None
    """Files of `text`; None without it."""


def read(
    path: Path,
    config: ModelConfig,
    model: str,
    roots: Roots = ANYWHERE,
    limits: TextLimits = DEFAULT_TEXT_LIMITS,
) -> Declared | None:
    """Return a version's declaration as an embedding model, or None.

    A tokenizer that cannot be used is named in the log: token ids are taken in any case.
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
    beside, no_text = text_files.read(path, model, roots, limits), ""
    if beside.problem:
        no_text = f"has no text support ({beside.problem})"
        structlog.get_logger("embeddings").warning(
            "embedding model without text support", model=model, reason=beside.problem
        )
    written_at = int(path.stat().st_mtime)
    return Declared(found, place, beside.tokens, no_text, written_at, beside.files)


def parse(text: bytes, place: str) -> Declaration:
    """Parse a declaration; raises InvalidModel with its place."""
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
