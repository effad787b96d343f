"""Imports a Hugging Face language model directory as a version directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from xlaserve.artifact import version_numbers
from xlaserve.errors import InvalidModel
from xlaserve.generation.exporting import export_generator
from xlaserve.importers.huggingface import agreement as agreement_of
from xlaserve.importers.huggingface import checkpoint, configuration, forward, quantising
from xlaserve.importers.huggingface.agreement import Agreement
from xlaserve.importers.huggingface.config_json import CONFIG
from xlaserve.importers.huggingface.form import Form

_OF_TEXT = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
"""Tokenizer files, copied if they exist."""


@dataclass(frozen=True, slots=True)
class ImportedLanguage:
    """The result of importing a language model."""

    path: Path
    """The version directory."""
    form: Form
    dtype: str
    """Datatype of the parameters in the checkpoint."""
    checkpoint_bytes: int
    """Size of the parameters in the checkpoint's datatype."""
    parameters_bytes: int
    """Size of the parameters after quantisation."""
    agreement: Agreement | None
    """How close the quantised model is to the original; None without quantisation."""
    files: Sequence[str]


def import_checkpoint(
    source: Path, directory: Path, version: int | None = None, quantise: str | None = None
) -> ImportedLanguage:
    """Import a checkpoint as a version of the model, by default the next version.

    Parameters keep their datatype, or are quantised to one of `quantising.KINDS`. Raises
    InvalidModel for an unsupported model, and FileExistsError if the version exists.
    """
    target = version_numbers.target(directory, version)
    form = configuration.read(source)
    # Use the target's file system, which needs space for the model anyway; /tmp may be in memory.
    scratch = next(place for place in target.absolute().parents if place.is_dir())
    params = checkpoint.read(source, form, scratch)
    if not form.stop_tokens:
        raise InvalidModel(
            f"{CONFIG}: eos_token_id: expected the token that ends an answer, got none"
        )
    dtype, before, agreement = params["embedding"].dtype, _bytes(params), None
    if quantise is not None:
        plain, params = params, quantising.quantised(params, quantise)
        agreement = agreement_of.measure(form, plain, params)
        del plain

    def init_cache(_: object, slots: int, length: int) -> Any:
        return forward.init_cache(form, dtype, slots, length)

    text_files = {name: source / name for name in _OF_TEXT if (source / name).is_file()}
    path = export_generator(
        partial(forward.decode, form),
        partial(forward.chunk, form),
        init_cache,
        params,
        target,
        vocab=form.vocab,
        max_length=form.max_length,
        stop_tokens=form.stop_tokens,
        files=text_files,
    )
    return ImportedLanguage(
        path, form, dtype.name, before, _bytes(params), agreement, tuple(text_files)
    )


def _bytes(params: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))
