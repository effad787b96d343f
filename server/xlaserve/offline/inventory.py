"""The models of a repository, listed without loading them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xlaserve.errors import InvalidModel, InvalidSettings, XlaserveError
from xlaserve.files.roots import Roots
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import CONFIG_FILES, read_config
from xlaserve.offline.checkup import unused_fields
from xlaserve.offline.local_copy import EVERY_VERSION
from xlaserve.residence.repository.fingerprints import files_below
from xlaserve.residence.repository.listing import subdirectories
from xlaserve.residence.repository.names import is_version
from xlaserve.residence.repository.no_version import why_no_version
from xlaserve.residence.repository.remote.part import RemotePart
from xlaserve.residence.repository.repository import Repository
from xlaserve.runtime import loaders
from xlaserve.storage.objects import StoreProblem

ENSEMBLE = "ensemble"


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """One version of a model."""

    number: int
    kind: str
    """`jax_export`, `onnx`, `python`, `generator`, `identity` or `ensemble`; empty if unknown."""
    size_bytes: int
    """Total size of the version's files."""
    served: bool
    """Whether the model's version policy selects it."""
    problem: str = ""
    """Why the version cannot be loaded, as far as its files tell."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of a repository."""

    name: str
    repository: str
    """The directory or URL that contains it."""
    configuration: str = ""
    """File name of the model's configuration, or empty."""
    without_effect: tuple[str, ...] = ()
    """Configuration fields without effect."""
    problem: str = ""
    """Why the model cannot be loaded: a refused configuration, or missing files."""
    versions: tuple[VersionEntry, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the distinct kinds of the model's versions."""
        return tuple(dict.fromkeys(version.kind for version in self.versions))


def list_models(repository: Repository) -> Iterator[ModelEntry]:
    """Yield every model of every part of the repository, sorted by part and name; blocks.

    For models in stores, it reads only listings, configurations and headers. Raises InvalidSettings
    for a part that cannot be listed.
    """
    for part in repository.parts:
        remote = repository.remotes.at(part.root)
        if remote is not None:
            remote.refresh()
        try:
            names = part.listing().models
        except (StoreProblem, OSError) as error:
            expected = f"what can be listed ({error})"
            raise InvalidSettings("repository", expected, part.place) from error
        for name in names:
            if remote is not None:
                yield _in_store(remote, name)
            else:
                home = Path(part.directory(name))
                yield _entry(name, part.place, home, repository.confines)


def _in_store(part: RemotePart, name: str) -> ModelEntry:
    try:
        part.prepare(name, EVERY_VERSION)
        home = part.find_own(name, EVERY_VERSION).versions[0].home
    except XlaserveError as error:
        return ModelEntry(name, part.place, problem=str(error))
    return _entry(name, part.place, home, Roots.of((home,)))


def _entry(name: str, place: str, home: Path, roots: Roots) -> ModelEntry:
    present = [file for file in CONFIG_FILES if os.path.lexists(home / file)]
    config, problem = ModelConfig(), ""
    try:
        config = read_config(roots.confine(home), roots=roots)
        config.check_name(name)
    except InvalidModel as error:
        problem = str(error)
    paths = {int(path.name): path for path in _versions(home)}
    served = config.version_policy.select(paths)
    versions = tuple(
        _version(number, path, config, number in served, roots)
        for number, path in sorted(paths.items())
    )
    if not served and not problem and not config.is_ensemble:
        problem = _why_no_version(home)
    return ModelEntry(name, place, " and ".join(present), unused_fields(config), problem, versions)


def _why_no_version(home: Path) -> str:
    try:
        return why_no_version(home)
    except OSError as error:
        return f"its files cannot be read: {error.strerror}"


def _versions(home: Path) -> list[Path]:
    try:
        return [path for path in subdirectories(home) if is_version(path.name)]
    except OSError:  # no version of an unreadable directory could be loaded
        return []


def _version(
    number: int, path: Path, config: ModelConfig, served: bool, roots: Roots
) -> VersionEntry:
    kind, problem, size = "", "", 0
    try:
        size = sum(file.stat().st_size for file in map(roots.confine, files_below(path)))
        kind = ENSEMBLE if config.is_ensemble else loaders.recognised(path, config)
    except InvalidModel as error:
        problem = str(error)
    except OSError as error:
        problem = f"its files cannot be read: {error.strerror}"
    return VersionEntry(number, kind, size, served, problem)
