"""Reads the sentence-transformers files of an encoder; unsupported settings are errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.importers.huggingface.encoders.form import POOLINGS

T = TypeVar("T")

MODULES = "modules.json"
TRANSFORMER = "sentence_bert_config.json"
TOKENIZER = "tokenizer_config.json"
MODEL = "config_sentence_transformers.json"
_POOLING = "config.json"
_LIMIT_BYTES = 16 << 20
_UNLIMITED = 1 << 31

_FLAGS: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_OF_TRANSFORMER: Mapping[str, tuple[object, ...]] = {
    "do_lower_case": (False,),
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "modality_config": (
        {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    ),
    "model_args": ({},),
    "tokenizer_args": ({},),
    "config_args": ({},),
}
"""Keys that must have one of these values, if present."""
_OF_NORMALIZE: Mapping[str, tuple[object, ...]] = {
    "module_input_name": ("sentence_embedding",),
    "module_output_name": ("sentence_embedding",),
}
_OF_TOKENS = 2
"""Index of the Normalize module, if there is one."""
_OF_MODEL: Mapping[str, tuple[object, ...]] = {
    "similarity_fn_name": ("cosine", "dot", "euclidean", "manhattan", None),
    "model_type": ("SentenceTransformer",),
    "truncate_dim": (None,),
}


@dataclass(frozen=True, slots=True)
class Sentences:
    """How token vectors become an embedding; by default their mean."""

    poolings: tuple[str, ...] = ("mean",)
    is_normalised: bool = False
    max_tokens: int | None = None
    prompt: str = ""


class _Module(msgspec.Struct):
    idx: int
    path: str
    type: str


def read(directory: Path, hidden: int) -> Sentences:
    """Return the settings in a model directory; raises InvalidModel."""
    if not (directory / MODULES).exists():
        return Sentences(max_tokens=_of_tokenizer(directory))
    modules = _read(directory, MODULES, list[_Module])
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        shown = ", ".join(module.type for module in modules)
        raise InvalidModel(
            f"{MODULES}: expected Transformer, Pooling and optionally Normalize, got {shown[:200]}"
        )
    for module in modules:
        if module.path.startswith("/") or ".." in Path(module.path).parts:
            raise InvalidModel(
                f"{MODULES}: expected paths within the directory, got '{module.path[:100]}'"
            )
    encoder, pooling = directory / modules[0].path, directory / modules[1].path
    if encoder.resolve() != directory.resolve():
        raise InvalidModel(
            f"{MODULES}: expected the encoder in the directory itself, got "
            f"'{modules[0].path[:100]}'"
        )
    if len(modules) > _OF_TOKENS and (directory / modules[_OF_TOKENS].path / _POOLING).exists():
        place = f"{modules[_OF_TOKENS].path}/{_POOLING}"
        folder = directory / modules[_OF_TOKENS].path
        _check(place, _read(folder, _POOLING, dict[str, object], place), _OF_NORMALIZE)
    return Sentences(
        _poolings(pooling, modules[1].path, hidden),
        len(modules) > _OF_TOKENS,
        _max_tokens(directory),
        _prompt(directory),
    )


def _poolings(folder: Path, path: str, hidden: int) -> tuple[str, ...]:
    place = f"{path}/{_POOLING}"
    found = _read(folder, _POOLING, dict[str, object], place)
    kinds = [kind for key, kind in _FLAGS.items() if found.pop(key, False) is True]
    mode = found.pop("pooling_mode", None)
    if mode is not None:
        kinds = [str(one) for one in (mode if isinstance(mode, list) else [mode])]
    for key in ("word_embedding_dimension", "embedding_dimension"):
        if found.pop(key, hidden) != hidden:
            raise InvalidModel(f"{place}: {key}: expected {hidden}, the encoder's size")
    _check(place, found, {"include_prompt": (True,)})
    if not kinds or not set(kinds) <= set(POOLINGS):
        raise InvalidModel(
            f"{place}: pooling_mode: expected one or more of {', '.join(POOLINGS)}, got"
            f" {kinds!r:.200}"
        )
    return tuple(kind for kind in POOLINGS if kind in kinds)


def _max_tokens(directory: Path) -> int | None:
    """Return the encoder's max_seq_length, or else the tokenizer's model_max_length."""
    most: object = None
    if (directory / TRANSFORMER).exists():
        found = _read(directory, TRANSFORMER, dict[str, object])
        most = found.pop("max_seq_length", None)
        _check(TRANSFORMER, found, _OF_TRANSFORMER)
    if most is not None:
        if isinstance(most, int) and not isinstance(most, bool) and most > 0:
            return most
        raise InvalidModel(f"{TRANSFORMER}: max_seq_length: expected 1 or more, got {most!r:.100}")
    return _of_tokenizer(directory)


def _of_tokenizer(directory: Path) -> int | None:
    """Return `model_max_length`, or None if it is missing or too large to be a real limit."""
    if not (directory / TOKENIZER).exists():
        return None
    most = _read(directory, TOKENIZER, dict[str, object]).get("model_max_length")
    return most if type(most) is int and 0 < most < _UNLIMITED else None


def _prompt(directory: Path) -> str:
    """Return the default prompt, which sentence-transformers prepends to every text."""
    if not (directory / MODEL).exists():
        return ""
    found = _read(directory, MODEL, dict[str, object])
    found.pop("__version__", None)
    prompts, name = found.pop("prompts", None) or {}, found.pop("default_prompt_name", None)
    _check(MODEL, found, _OF_MODEL)
    if name is None:
        return ""
    prompt = prompts.get(str(name)) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str):
        raise InvalidModel(f"{MODEL}: default_prompt_name: expected one of prompts, got {name!r}")
    return prompt


def _check(place: str, found: Mapping[str, object], known: Mapping[str, Sequence[object]]) -> None:
    for key, value in found.items():
        if key not in known:
            raise InvalidModel(
                f"{place}: '{key[:100]}' is not supported and may change the computation"
            )
        if value not in known[key]:
            raise InvalidModel(f"{place}: {key}: expected {known[key][0]!r}, got {value!r:.200}")


def _read(folder: Path, name: str, kind: type[T], place: str = "") -> T:
    with files.opened(folder, name, limit_bytes=_LIMIT_BYTES) as (file, _):
        text = file.read(_LIMIT_BYTES)
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidModel(f"{place or name} is not valid: {error}") from error
