"""Configured sizes of a generator, and the memory that they need."""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import structlog

from xlaserve.artifact import generator_record as record
from xlaserve.artifact import weights
from xlaserve.artifact.foreseen import Serving
from xlaserve.artifact.generator_record import LENGTH, Record
from xlaserve.artifact.sizes import EXECUTABLE_BYTES, ON_THE_HOST, Parts, whole
from xlaserve.artifact.weights import DTYPES
from xlaserve.errors import InvalidModel
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.language import files
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.generator.info import TEXT, GenerationInfo, mask_words

PREFIX_CACHE = "prefix_cache"
"""Parameter that enables the prefix cache."""
STEP_SIZES = "step_sizes"
"""Parameter that lists the step sizes in rows, in addition to all slots."""
DEFAULT_SLOTS = 8
DEFAULT_CHUNK = 128
MOST_SLOTS = 1024
MOST_WINDOWS = 8
MOST_STEP_SIZES = 8
GRAMMAR_BYTES = 800
"""Resident bytes per vocabulary token if grammars are compiled: 786 with 32,000 tokens, 782 with
256,000.
"""

TOKENIZER_BYTES = 1000
"""Resident bytes per vocabulary token of a tokenizer: 1,300 with 8,000 tokens, 960 with 32,000, 900
with 128,000.
"""
_SMALLEST_WINDOW = 256
_GROWTH = 4
_LEAST_GAIN = 4
"""Minimum ratio between default step sizes. A step of half the slots was no faster, because it
copies its part of the cache.
"""
_TABLES_BYTES = 9
"""Bytes per slot and vocabulary token: counts, prompt and bias."""
_WORD_BYTES = 4
_TOKEN_BYTES = 4
_ITEMSIZES: dict[str, int] = {dtype.name: dtype.itemsize for dtype in DTYPES.values()}


def read(found: Record, directory: Path, config: ModelConfig) -> GenerationInfo:
    """Return the configured sizes, with defaults for the others; raises InvalidModel."""
    slots = _number(config, "slots", DEFAULT_SLOTS, MOST_SLOTS)
    length = _number(config, "length", found.max_length, found.max_length, least=2)
    windows = _windows(config, length)
    chunk = _number(config, "chunk", min(DEFAULT_CHUNK, windows[0]), windows[0])
    return GenerationInfo(
        found.vocab,
        length,
        tuple(found.stop_tokens),
        directory,
        slots,
        windows,
        chunk,
        has_grammars=_boolean(config, "grammars"),
        keeps_prefixes=_keeps_prefixes(found, config),
        step_sizes=_step_sizes(config, slots),
    )


def without_prefixes(info: GenerationInfo, config: ModelConfig, model: str) -> GenerationInfo:
    """Disable the prefix cache for a generator whose cache rows cannot be reused, and log it.

    Raises InvalidModel if the configuration explicitly enables the prefix cache.
    """
    why = "cached rows of equal tokens differed in a trial"
    if PREFIX_CACHE in config.parameters:
        raise InvalidModel(f"parameter '{PREFIX_CACHE}': expected false, since {why}, got true")
    structlog.get_logger("generation").warning("prefix cache disabled", model=model, reason=why)
    return replace(info, keeps_prefixes=False)


def without_step_sizes(
    info: GenerationInfo, config: ModelConfig, model: str, why: str
) -> GenerationInfo:
    """Use all slots in every step of a generator that cannot run smaller steps, and log it.

    Raises InvalidModel if the configuration explicitly lists step sizes.
    """
    if STEP_SIZES in config.parameters:
        raise InvalidModel(
            f"parameter '{STEP_SIZES}': expected '{info.slots}', since {why}, got "
            f"'{config.parameters[STEP_SIZES][:64]}'"
        )
    structlog.get_logger("generation").warning(
        "smaller step sizes disabled", model=model, reason=why
    )
    return replace(info, step_sizes=())


def predict_size(
    directory: Path,
    parts: Callable[[str], int],
    roots: Roots = ANYWHERE,
    serving: Serving = ON_THE_HOST,
) -> int:
    """Predict the bytes of parameters and programs; raises InvalidModel."""
    record.read(directory, roots)
    entries = weights.read_entries(directory, record.WEIGHTS, roots)
    held: int = sum(entry.nbytes // parts(entry.name) for entry in entries)
    return held + (3 * MOST_WINDOWS + 2) * EXECUTABLE_BYTES


def cache_name(index: int) -> str:
    """Return the name of a cache array in partition rules."""
    return f"cache/{index}"


def predict_slots(
    directory: Path, config: ModelConfig, roots: Roots = ANYWHERE, parts: Parts = whole
) -> int:
    """Predict the bytes per device of the cache and counters of all slots.

    Includes the memory of steps with fewer rows. Raises InvalidModel.
    """
    found = record.read(directory, roots)
    info = read(found, directory, config)
    unknown = [array.dtype for array in found.cache if array.dtype not in _ITEMSIZES]
    if unknown:
        raise InvalidModel(
            f"{record.FILE_NAME} is not valid: the cache has the unknown dtype '{unknown[0][:32]}'"
        )
    cache: int = sum(
        prod(array.sized(info.slots, info.max_length))
        * _ITEMSIZES[array.dtype]
        // parts(cache_name(index))
        for index, array in enumerate(found.cache)
    )
    tables = info.vocab * _TABLES_BYTES + mask_words(info.vocab) * _WORD_BYTES
    # A step with fewer slots copies its share of the cache; the largest such step counts.
    gathered = cache * max(info.step_sizes, default=0) // info.slots
    programs = len(info.step_sizes) * len(info.windows) * EXECUTABLE_BYTES
    host = host_bytes(info, has_text=_may_have_text(directory, config))
    return cache + gathered + programs + info.slots * tables + host


def host_bytes(info: GenerationInfo, *, has_text: bool) -> int:
    """Return the host memory of the tokenizer, grammars, and tokens of the prefix cache."""
    tokenizer = info.vocab * TOKENIZER_BYTES if has_text else 0
    grammars = info.vocab * GRAMMAR_BYTES if info.has_grammars else 0
    kept = info.slots * info.max_length * _TOKEN_BYTES if info.keeps_prefixes else 0
    return tokenizer + grammars + kept


def _may_have_text(directory: Path, config: ModelConfig) -> bool:
    """Tell whether a load may read a tokenizer."""
    wanted = config.parameters.get(TEXT, "true").strip().lower() != "false"
    return wanted and (directory / files.TOKENIZER).exists()


def _windows(config: ModelConfig, length: int) -> tuple[int, ...]:
    written = config.parameters.get("windows")
    if written is None:
        found = [min(length, _SMALLEST_WINDOW * _GROWTH**power) for power in range(MOST_WINDOWS)]
        return tuple(sorted({*found[:3], length}))
    sizes = _numbers("windows", written, MOST_WINDOWS, length)
    return tuple(sorted({*sizes, length}))


def _step_sizes(config: ModelConfig, slots: int) -> tuple[int, ...]:
    """Return the step sizes that are smaller than the number of slots."""
    written = config.parameters.get(STEP_SIZES)
    if written is None:
        powers = (_LEAST_GAIN**power for power in range(MOST_STEP_SIZES))
        return tuple(size for size in powers if size == 1 < slots or size * _LEAST_GAIN <= slots)
    sizes = _numbers(STEP_SIZES, written, MOST_STEP_SIZES, slots)
    return tuple(size for size in sizes if size < slots)


def _numbers(name: str, written: str, most: int, largest: int) -> list[int]:
    """Parse a list of numbers; return them in ascending order, without duplicates."""
    parts = [part.strip() for part in written.split(",")]
    is_valid = len(parts) <= most and all(_is_number(part) for part in parts)
    found = sorted({int(part) for part in parts}) if is_valid else []
    if not found or found[0] < 1 or found[-1] > largest:
        raise InvalidModel(
            f"parameter '{name}': expected up to {most} comma-separated numbers from 1 to "
            f"{largest}, got '{written[:64]}'"
        )
    return found


def _number(config: ModelConfig, name: str, default: int, most: int, *, least: int = 1) -> int:
    written = config.parameters.get(name, str(default)).strip()
    number = int(written) if _is_number(written) else 0
    if not least <= number <= most:
        raise InvalidModel(f"parameter '{name}': expected {least} to {most}, got '{written[:64]}'")
    return number


def _keeps_prefixes(found: Record, config: ModelConfig) -> bool:
    """Tell whether cache rows can be reused for prompts with a common prefix.

    A cache array without a position axis is a state of all tokens so far, so no state exists for a
    shared prefix alone.
    """
    has_rows = all(LENGTH in array.shape for array in found.cache)
    wanted = _boolean(config, PREFIX_CACHE, default=has_rows)
    if wanted and not has_rows:
        raise InvalidModel(
            f"parameter '{PREFIX_CACHE}': expected false, since an array of the cache has no "
            "positions, got true"
        )
    return wanted


def _boolean(config: ModelConfig, name: str, *, default: bool = False) -> bool:
    written = config.parameters.get(name, str(default).lower()).strip()
    if written not in ("true", "false"):
        raise InvalidModel(f"parameter '{name}': expected true or false, got '{written[:64]}'")
    return written == "true"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
