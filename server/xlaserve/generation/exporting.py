"""Writes the functions of a language model and its parameters as a version directory.

export_generator(
    decode, chunk, init_cache, params, "models/story/1",
    vocab=256, max_length=1024, stop_tokens=[0],
)
"""

# Some jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.export
import jax.numpy as jnp
import structlog

from xlaserve import build
from xlaserve.artifact import artifact, dimensions, parameters, weights
from xlaserve.artifact import generator_record as record
from xlaserve.artifact.computation import lasting, not_lasting, to_file
from xlaserve.artifact.generator_record import CHUNK, DECODE, LENGTH, SLOTS, WEIGHTS, Array, Record
from xlaserve.artifact.written_by import Writer
from xlaserve.authoring import read_back
from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.temporary import TemporaryDirectory
from xlaserve.generation.sampling import INTEGERS, REALS, Tables, sample
from xlaserve.runtime.generator.info import mask_words

Decode: TypeAlias = Callable[..., Any]
"""`decode(params, cache, window, tokens[b], positions[b]) -> (logits[b, vocab], cache)`. Writes row
`positions[i]` of slot i, dropping positions beyond the end, and attends to positions up to it.
`window` is an int8 vector whose length is the number of positions that attention must consider.
"""
Chunk: TypeAlias = Callable[..., Any]
"""`chunk(params, cache, window, tokens[c], slot, start, n) -> (logits[vocab], cache)`. Computes
rows `start` to `start + c` of a slot, of which the first n are real; rows beyond the end must be
dropped, not clamped. The logits are those of the last real token.
"""
InitCache: TypeAlias = Callable[..., Any]
"""`init_cache(params, slots, length) -> cache`: a pytree of arrays whose first axis is
the slots.
"""

PLATFORMS = ("cpu", "cuda", "tpu")
_NO_FILES: Mapping[str, Path] = MappingProxyType({})
_SIZES = ((2, 16), (3, 24))
"""Two pairs of slots and length, for which the cache's shapes are compared to identify its axes."""
_NAME_CHARACTERS = 200


def export_generator(
    decode: Decode,
    chunk: Chunk,
    init_cache: InitCache,
    params: object,
    path: Path | str,
    *,
    vocab: int,
    max_length: int,
    stop_tokens: Sequence[int],
    files: Mapping[str, Path] = _NO_FILES,
    platforms: Sequence[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Export a language model to the version directory `<model>/<version>`, and return its path.

    The programs have symbolic dimensions for slots, length, window and chunk: the server compiles
    them for its configuration. The directory is created atomically, with all its files.

    `decode(params, cache, window, tokens[b], positions[b])` returns logits[b, vocab] and the cache.
    `chunk(params, cache, window, tokens[c], slot, start, n)` returns logits[vocab] and the cache.
    `init_cache(params, slots, length)` returns the cache, a pytree of arrays, slots first.
    `params` is any pytree; `path` is the version directory, REPOSITORY/MODEL/VERSION.
    `vocab` is the number of tokens, `max_length` the maximum length of a prompt and its answer
    together, and `stop_tokens` are the tokens that end an answer.
    `files` are copied into the directory under these names, such as the files of a tokenizer.
    `platforms` are the platforms to run on; None for "cpu", "cuda" and "tpu".
    `overwrite` replaces an existing version.

    Raises InvalidModel, or FileExistsError if the version exists.
    """
    target = Path(path)
    if not (target.name.isascii() and target.name.isdigit() and target.name[0] != "0"):
        raise InvalidModel(f"expected a path MODEL/VERSION with a version like 1, got '{target}'")
    if target.exists() and not overwrite:
        raise FileExistsError(
            f"{target} already exists: choose another version number, or replace it with"
            " overwrite=True"
        )
    _check_names(files)
    with jax.enable_x64(False):
        made = _Programs((decode, chunk), init_cache, params, vocab, tuple(stop_tokens))
        programs = made.exported(tuple(platforms or PLATFORMS))
    with TemporaryDirectory.beside(target) as temporary:
        directory = temporary.path / target.name
        directory.mkdir()
        record.write(directory, _record(directory, made, programs, max_length, files))
        read_back.check(directory)
        made.check_length(max_length)
        directory.chmod(0o755)
        temporary.replace(directory, target)
    _log_restrictions(target, programs)
    return target


def _log_restrictions(target: Path, programs: Mapping[str, bytes]) -> None:
    """Warn about programs that only certain JAX versions can read."""
    for name, data in programs.items():
        module = artifact.deserialize(bytearray(data), name=name).mlir_module_serialized
        if reason := not_lasting(module):
            structlog.get_logger("export").warning(
                "exported, with a restriction", path=str(target), reason=f"{name}: {reason}"
            )


class _Programs:
    """The author's functions, flattened and combined with sampling, as exported programs."""

    def __init__(
        self,
        functions: tuple[Decode, Chunk],
        init_cache: InitCache,
        params: object,
        vocab: int,
        stop_tokens: tuple[int, ...],
    ) -> None:
        self._decode, self._chunk = functions
        self.vocab = vocab
        self.stop_tokens = stop_tokens
        self._init_cache = partial(init_cache, params)
        self.parameters = parameters.flatten(params, x64=False)
        found = [jax.eval_shape(lambda b=b, t=t: init_cache(params, b, t)) for b, t in _SIZES]
        (small, self._tree), (large, _) = map(jax.tree.flatten, found)
        self.cache = [_array(*pair) for pair in zip(small, large, strict=True)]

    def check_length(self, length: int) -> None:
        """Raise InvalidModel if the cache has fewer positions than `length`, like a ring buffer.

        Small caches cannot show that: a ring of 512 positions has 24 if the length is 24.
        """
        slots = _SIZES[0][0]
        found = jax.tree.leaves(jax.eval_shape(lambda: self._init_cache(slots, length)))
        for index, (array, expected) in enumerate(zip(found, self.cache, strict=True)):
            if array.shape != expected.sized(slots, length):
                raise InvalidModel(
                    f"init_cache: expected array {index} of the cache as "
                    f"{list(expected.sized(slots, length))} for a max_length of {length}, got"
                    f" {list(array.shape)}: ring-buffer caches shorter than max_length are not"
                    " supported"
                )

    def exported(self, platforms: tuple[str, ...]) -> dict[str, bytes]:
        """Return the exported programs by file name; each has its own symbolic dimensions."""
        i4 = jnp.dtype("int32")
        arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.parameters.arrays.values()]
        b, t, w = dimensions.symbolic("b, t, w", constraints=["t >= w"])
        rows = [
            jax.ShapeDtypeStruct((b, self.vocab), dtype) for dtype in ("int32", "int8", "float32")
        ]
        of_decode = (
            *(arrays, self._cache(b, t), *rows, jax.ShapeDtypeStruct((w,), jnp.int8)),
            jax.ShapeDtypeStruct((b, len(INTEGERS)), i4),
            jax.ShapeDtypeStruct((b, len(REALS)), jnp.float32),
            jax.ShapeDtypeStruct((b, mask_words(self.vocab)), i4),
        )
        b, t, w, c = dimensions.symbolic("b, t, w, c", constraints=["t >= w", "w >= c"])
        one = jax.ShapeDtypeStruct((), i4)
        of_chunk = (
            *(arrays, self._cache(b, t), jax.ShapeDtypeStruct((w,), jnp.int8)),
            *(jax.ShapeDtypeStruct((c,), i4), one, one, one),
        )
        return {
            DECODE: _exported("decode", self._step, of_decode, (1, 2), platforms),
            CHUNK: _exported("chunk", self._prefill, of_chunk, (1,), platforms),
        }

    def _cache(self, slots: Any, length: Any) -> list[jax.ShapeDtypeStruct]:
        sizes = {SLOTS: slots, LENGTH: length}
        return [
            jax.ShapeDtypeStruct(tuple(sizes.get(size, size) for size in array.shape), array.dtype)
            for array in self.cache
        ]

    def _step(
        self,
        arrays: list[jax.Array],
        cache: list[jax.Array],
        *others: jax.Array,
    ) -> tuple[Any, ...]:
        counts, prompt, bias, window, integers, reals, mask = others
        params = self.parameters.unflatten(arrays)
        token, position, is_active = (integers[:, index] for index in range(3))
        held = jax.tree.unflatten(self._tree, cache)
        logits, following = self._decode(params, held, window, token, position)
        _check("decode", "logits", logits.shape, (token.shape[0], self.vocab))
        tables = Tables(counts, prompt, bias, mask)
        found = sample(logits, tables, integers, reals, self.stop_tokens)
        rows = jnp.arange(token.shape[0])
        return (
            *found,
            self._leaves("decode", cache, following),
            counts.at[rows, found[0]].add(is_active),
        )

    def _prefill(
        self,
        arrays: list[jax.Array],
        cache: list[jax.Array],
        *others: jax.Array,
    ) -> list[jax.Array]:
        # The logits are unused: `decode` computes the last token of a prompt and samples.
        params, held = self.parameters.unflatten(arrays), jax.tree.unflatten(self._tree, cache)
        logits, following = self._chunk(params, held, *others)
        _check("chunk", "logits", logits.shape, (self.vocab,))
        return self._leaves("chunk", cache, following)

    def _leaves(self, name: str, before: list[jax.Array], following: object) -> list[jax.Array]:
        leaves = jax.tree.leaves(following)
        tree: object = jax.tree.structure(following)
        if tree != self._tree:
            raise InvalidModel(
                f"{name}: expected the cache of init_cache, {self._tree}, got {tree}"
            )
        for index, (old, new) in enumerate(zip(before, leaves, strict=True)):
            _check(
                name, f"array {index} of the cache", (new.dtype, new.shape), (old.dtype, old.shape)
            )
        return leaves


def _array(small: Any, large: Any) -> Array:
    """Return the description of a cache array, from two that differ in slots and length."""
    shape = []
    for sizes in zip(small.shape, large.shape, strict=True):
        found = [
            mark
            for mark, pair in zip((SLOTS, LENGTH), zip(*_SIZES, strict=True), strict=True)
            if pair == sizes
        ]
        if not found and sizes[0] != sizes[1]:
            raise InvalidModel(
                f"init_cache: expected the size of each axis to be slots, positions or fixed, got "
                f"{sizes[0]} and {sizes[1]} for {_SIZES[0]} and {_SIZES[1]} slots and positions"
            )
        shape.append(found[0] if found else sizes[0])
    if shape[:1] != [SLOTS]:
        raise InvalidModel(f"init_cache: expected slots as the first axis, got {list(small.shape)}")
    return Array(str(small.dtype), shape)


def _check(name: str, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise InvalidModel(f"{name}: expected {what} as {expected}, got {found}")


def _exported(
    name: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    donated: tuple[int, ...],
    platforms: tuple[str, ...],
) -> bytes:
    try:
        jitted = jax.jit(function, donate_argnums=donated)
        exported = jax.export.export(jitted, platforms=platforms)(*arguments)
        return to_file(exported, lasting(exported))
    except InvalidModel:
        raise
    # The author's code may raise anything while it is traced.
    except Exception as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidModel(f"{name} cannot be exported: {line[:300]}") from error


def _check_names(copied: Mapping[str, Path]) -> None:
    for name in copied:
        is_plain = name == Path(name).name and 0 < len(name) <= _NAME_CHARACTERS and name[0] != "."
        if not is_plain or name in (record.FILE_NAME, DECODE, CHUNK, WEIGHTS):
            raise InvalidModel(
                f"files: expected a plain file name not already used, got '{name[:64]}'"
            )


def _record(
    directory: Path,
    made: _Programs,
    programs: Mapping[str, bytes],
    max_length: int,
    copied: Mapping[str, Path],
) -> Record:
    """Write all files except the record, and return the record."""
    arrays = made.parameters.arrays
    written = {
        name: files.write_atomically(directory / name, [data])
        for name, data in (*programs.items(), *((n, p.read_bytes()) for n, p in copied.items()))
    }
    written[WEIGHTS] = weights.write(directory / WEIGHTS, arrays)
    return Record(
        record.FORMAT_VERSION,
        record.KIND,
        Writer(jax.__version__, build.version()).text,
        list(artifact.deserialize(bytearray(programs[DECODE])).platforms),
        made.vocab,
        max_length,
        list(made.stop_tokens),
        list(arrays),
        made.cache,
        {DECODE: [1, 2], CHUNK: [1]},
        {name: record.File(one.size_bytes, one.sha256) for name, one in written.items()},
    )
