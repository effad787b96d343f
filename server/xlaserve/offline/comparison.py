"""The differences between two versions, models or repositories on disk."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from betterproto import Casing

from xlaserve.errors import InvalidModel, InvalidRequest
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.schema import given_of
from xlaserve.model_config.text import CONFIG_FILES, read_config
from xlaserve.offline import contents
from xlaserve.offline.contents import Contents, Item
from xlaserve.residence.repository.listing import is_model, list_root, subdirectories
from xlaserve.residence.repository.names import is_version
from xlaserve.runtime import loaders

_MAX_MODELS = 1_000_000


class Level(StrEnum):
    """The kind of a compared path."""

    VERSION = "a version"
    MODEL = "a model"
    REPOSITORY = "a repository"


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between the two sides."""

    at: str
    """Location of the difference relative to the compared paths: `MODEL/VERSION`, `MODEL`, or
    empty."""
    kind: str
    """`model`, `version`, or one of the kinds in `contents`."""
    name: str
    before: Item | None
    """The item on the first side; None if it is missing there."""
    after: Item | None
    """The item on the second side; None if it is missing there."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of a comparison."""

    level: Level
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    """Remarks on parts that could not be compared individually."""


def level_of(path: Path) -> Level:
    """Tell whether a path is a version, a model or a repository; raises InvalidRequest."""
    if path.is_file():
        return Level.VERSION
    if not path.is_dir():
        raise InvalidRequest(
            f"expected a version, a model or a repository at '{path}', got nothing"
        )
    resolved = path.resolve()
    if is_version(resolved.name) and is_model(resolved.parent):
        return Level.VERSION
    if is_model(path):
        return Level.MODEL
    inner = subdirectories(path)
    is_empty = not any(path.iterdir())
    return Level.REPOSITORY if is_empty or any(map(is_model, inner)) else Level.VERSION


def compare(before: Path, after: Path, *, only: str = "") -> Comparison:
    """Return the differences; reads every file completely. Blocks.

    `only` restricts the comparison of two repositories to one model. Raises InvalidRequest unless
    both paths are of the same level, and InvalidModel for unreadable files.
    """
    level, other = level_of(before), level_of(after)
    if level is not other:
        raise InvalidRequest(
            f"expected two repositories, two models or two versions, got {level} and {other}"
        )
    if only and level is not Level.REPOSITORY:
        raise InvalidRequest(f"model '{only}': expected two repositories, got {level} and {other}")
    notes: dict[str, None] = {}
    differences = tuple(_COMPARE[level](before, after, only, notes))
    return Comparison(level, differences, tuple(notes))


# --- Levels ---

Notes = dict[str, None]


def _repositories(before: Path, after: Path, only: str, notes: Notes) -> Iterator[Difference]:
    first, second = (_models(path, only) for path in (before, after))
    if only and only not in first and only not in second:
        raise InvalidRequest(f"model '{only}': not found in '{before}' or '{after}'")
    yield from _one_sided("", "model", first, second)
    for name in sorted(first.keys() & second.keys()):
        yield from _models_differ(name, first[name], second[name], notes)


def _only_models(before: Path, after: Path, only: str, notes: Notes) -> Iterator[Difference]:
    return _models_differ("", before, after, notes)


def _models_differ(at: str, before: Path, after: Path, notes: Notes) -> Iterator[Difference]:
    first, second = _Home.at(before, notes), _Home.at(after, notes)
    yield from _differing(at, first.contents, second.contents)
    old, new = _versions(before), _versions(after)
    yield from _one_sided(at, "version", old, new)
    for number in sorted(old.keys() & new.keys(), key=int):
        place = f"{at}/{number}" if at else number
        yield from _differing(place, first.read(old[number]), second.read(new[number]))


def _only_versions(before: Path, after: Path, only: str, notes: Notes) -> Iterator[Difference]:
    first, second = _Home.at(_home(before), notes), _Home.at(_home(after), notes)
    if first.directory.resolve() != second.directory.resolve():
        yield from _differing("", first.contents, second.contents)
    yield from _differing("", first.read(before), second.read(after))


_COMPARE = {
    Level.REPOSITORY: _repositories,
    Level.MODEL: _only_models,
    Level.VERSION: _only_versions,
}


# --- Contents ---


@dataclass(frozen=True, slots=True)
class _Home:
    """A model's directory, or any other directory that contains versions."""

    directory: Path
    config: ModelConfig
    contents: Contents
    """The configuration, and the files next to the version directories."""
    notes: Notes

    @classmethod
    def at(cls, directory: Path, notes: Notes) -> "_Home":
        config, found = ModelConfig(), Contents()
        if is_model(directory):
            try:
                config = read_config(directory)
            except InvalidModel as error:
                # The fields cannot be compared, but the hash of the whole file is.
                notes[f"{directory}: {error}"] = None
            for path, value in config_paths(config).items():
                found.add("configuration", path, value)
            for name, item in contents.hash_files(directory).items():
                # A parsed configuration is compared by its fields, whatever its notation.
                if name not in CONFIG_FILES or config.message is None:
                    found.add("file", name, item.text, item.sha256)
        return cls(directory, config, found, notes)

    def read(self, version: Path) -> Contents:
        """Return the contents of one of its versions."""
        try:
            kind = loaders.recognised(version, self.config)
        except InvalidModel as error:
            kind = ""
            self.notes[f"{version}: {error}"] = None
        found = contents.read(version, kind, self.config)
        for note in found.notes:
            self.notes[f"{version}: {note}"] = None
        return found


def _home(version: Path) -> Path:
    return version.resolve().parent


def _models(repository: Path, only: str) -> Mapping[str, Path]:
    try:
        names = list_root(repository, max_models=_MAX_MODELS).models
    except OSError as error:
        raise InvalidModel(f"'{repository}' cannot be read: {error.strerror}") from error
    return {name: repository / name for name in names if only in ("", name)}


def _versions(home: Path) -> Mapping[str, Path]:
    return {path.name: path for path in subdirectories(home) if is_version(path.name)}


def _one_sided(
    at: str, kind: str, first: Mapping[str, Path], second: Mapping[str, Path]
) -> Iterator[Difference]:
    for name in sorted(first.keys() ^ second.keys()):
        here = Item("")
        yield Difference(
            at, kind, name, here if name in first else None, here if name in second else None
        )


def _differing(at: str, first: Contents, second: Contents) -> Iterator[Difference]:
    for kind in dict.fromkeys((*first.items, *second.items)):
        old, new = first.items.get(kind, {}), second.items.get(kind, {})
        for name in dict.fromkeys((*old, *new)):
            before, after = old.get(name), new.get(name)
            if before != after:
                yield Difference(at, kind, name, before, after)


_NAMES = ("name", "model_name", "key")
"""Members that identify an element of a list, wherever in the list it is."""


def config_paths(config: ModelConfig) -> Mapping[str, str]:
    """Return every field set in the configuration, by path.

    A path is, for example, `dynamic_batching.max_queue_delay_microseconds`. Elements of lists are
    identified by name, as in `input['x'].dims`, or else by index. A field that is explicitly set to
    its default is included, since it may differ from an unset field.
    """
    message = config.message
    if message is None:
        return {}
    written: dict[str, object] = message.to_dict(casing=Casing.SNAKE)  # type: ignore[arg-type]  # a function
    found = dict(_walk("", written))
    for name in sorted(given_of(message)):
        if name not in written:
            found[name] = _shown(getattr(message, name))
    return found


def _walk(path: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, member in value.items():
            yield from _walk(f"{path}.{key}" if path else str(key), member)
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        keys = [_key(one) for one in value]
        # Duplicate names do not identify an element.
        is_named = all(keys) and len(set(keys)) == len(keys)
        for place, one in enumerate(value):
            yield from _walk(f"{path}['{keys[place]}']" if is_named else f"{path}[{place}]", one)
        if is_named:
            yield f"{path} (order)", ", ".join(keys)
    else:
        yield path, _shown(value)


def _key(element: Mapping[str, object]) -> str:
    return next((str(element[name]) for name in _NAMES if element.get(name)), "")


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return str(value)
