"""Imports a Hugging Face encoder directory as a version directory."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import msgspec

from xlaserve.artifact import version_numbers
from xlaserve.authoring import read_back
from xlaserve.authoring.export import Exportable
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.temporary import TemporaryDirectory
from xlaserve.importers.huggingface.encoders import configuration, forward, parameters
from xlaserve.importers.huggingface.encoders.form import EncoderForm
from xlaserve.runtime.embedding import declared
from xlaserve.runtime.embedding.declared import Declaration

TOKENS = "tokens"
"""Name of the sequence dimension, which stays dynamic."""
DEFAULT_ROWS = 16
_LEAST_TOKENS = 32
_OF_TEXT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class ImportedEncoder:
    """The result of importing an encoder."""

    path: Path
    """The version directory."""
    form: EncoderForm
    lengths: Sequence[int]
    """Numbers of tokens for which programs are compiled."""
    dtype: str
    parameters_bytes: int
    files: Sequence[str]
    left_out: Sequence[str]
    """Names of checkpoint tensors that belong to heads and were not imported."""


def import_encoder(
    source: Path,
    directory: Path,
    version: int | None = None,
    max_batch_size: int | None = None,
    lengths: Sequence[int] | None = None,
) -> ImportedEncoder:
    """Import an encoder as a version of the model, by default the next version.

    Parameters keep their datatype. `lengths` are the numbers of tokens to compile programs for, by
    default powers of two. Raises InvalidModel for an unsupported model, and FileExistsError if the
    version exists.
    """
    target = version_numbers.target(directory, version)
    form, family = configuration.read(source)
    params, left_out = parameters.read(source, form, family)
    sizes = _lengths(form, lengths)
    ids = ("INT32", [-1, TOKENS])
    model = Exportable(
        partial(_embed, form),
        params,
        {"input_ids": ids, "attention_mask": ids},
        max_batch_size=DEFAULT_ROWS if max_batch_size is None else max_batch_size,
        compiled_shapes={TOKENS: sizes},
    )
    text_files = [name for name in _OF_TEXT if (source / name).is_file()]
    with TemporaryDirectory.beside(target) as temporary:
        made = model.write(temporary.path / target.name)
        for name in text_files:
            shutil.copyfile(source / name, made / name)
        declaration = Declaration(
            max_tokens=sizes[-1], vocab=form.vocab, pad=form.pad, prompt=form.prompt
        )
        text = msgspec.json.format(msgspec.json.encode(declaration), indent=2)
        files.write_atomically(made / declared.FILE_NAME, [text, b"\n"])
        read_back.check(made)
        temporary.replace(made, target)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    dtype = params["embedding"].dtype.name
    return ImportedEncoder(target, form, sizes, dtype, size, tuple(text_files), left_out)


def _embed(
    form: EncoderForm, params: forward.Parameters, input_ids: jax.Array, attention_mask: jax.Array
) -> dict[str, jax.Array]:
    return {"embedding": forward.embed(form, params, input_ids, attention_mask)}


def _lengths(form: EncoderForm, requested: Sequence[int] | None) -> list[int]:
    """Return the numbers of tokens to compile programs for, ascending; raises InvalidModel."""
    if requested is None:
        found = {form.max_tokens}
        power = _LEAST_TOKENS
        while power < form.max_tokens:
            found.add(power)
            power *= 2
        return sorted(found)
    if not all(1 <= one <= form.max_tokens for one in requested):
        raise InvalidModel(
            f"--dim {TOKENS}: expected 1 to {form.max_tokens}, the model's range, got "
            f"{', '.join(map(str, requested))}"
        )
    return sorted(set(requested))
