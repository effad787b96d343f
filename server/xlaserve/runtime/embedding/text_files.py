"""The tokenizer files of an embedding model, and their identity."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from xlaserve.errors import InvalidModel
from xlaserve.errors.language import TextNotInstalled
from xlaserve.files.roots import Roots
from xlaserve.language import files, tokenizing
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS, TextLimits
from xlaserve.language.tokenizing import Tokens


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The place of a tokenizer, for processes that read it again."""

    version: Path
    """The version directory, or the file of a single-file version."""
    roots: Roots
    digest: str
    """The SHA-256 of the tokenizer's file."""


@dataclass(frozen=True, slots=True)
class FoundText:
    """Tokenizer of a version, or its problem; neither without a file."""

    tokens: Tokens | None = None
    problem: str = ""
    files: TextFiles | None = None
    """None without `tokens`."""


def read(
    version: Path, model: str, roots: Roots, limits: TextLimits = DEFAULT_TEXT_LIMITS
) -> FoundText:
    """Return a version's tokenizer; errors in its files are not raised. Blocks."""
    folder = version if version.is_dir() else version.parent
    try:
        data = files.read(folder, files.TOKENIZER, roots.open)
        if data is None:
            return FoundText()
        tokens = tokenizing.parse(data, model, limits)
    except (InvalidModel, TextNotInstalled) as error:
        return FoundText(problem=str(error))
    return FoundText(tokens, "", TextFiles(version, roots, hashlib.sha256(data).hexdigest()))
