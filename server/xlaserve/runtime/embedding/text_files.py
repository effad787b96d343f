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
    """Location and digest of a tokenizer, so that other processes can read the same one."""

    version: Path
    """The version directory, or the file of a single-file version."""
    roots: Roots
    digest: str
    """SHA-256 of the tokenizer file."""


@dataclass(frozen=True, slots=True)
class FoundText:
    """A version's tokenizer, or why it is unusable; neither if there is no tokenizer file."""

    tokens: Tokens | None = None
    problem: str = ""
    files: TextFiles | None = None
    """The files of `tokens`, or None without a tokenizer."""


def read(
    version: Path, model: str, roots: Roots, limits: TextLimits = DEFAULT_TEXT_LIMITS
) -> FoundText:
    """Read a version's tokenizer; problems with its files are returned, not raised. Blocks."""
    folder = version if version.is_dir() else version.parent
    try:
        data = files.read(folder, files.TOKENIZER, roots.open)
        if data is None:
            return FoundText()
        tokens = tokenizing.parse(data, model, limits)
    except (InvalidModel, TextNotInstalled) as error:
        return FoundText(problem=str(error))
    return FoundText(tokens, "", TextFiles(version, roots, hashlib.sha256(data).hexdigest()))
