"""Finds the models on disk, with their versions and configurations.

All methods block on disk I/O and run in threads, never on the event loop.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from xlaserve.errors import FilesMissing, InvalidModel, InvalidName, LoadFailed, ModelNotFound
from xlaserve.files.roots import Roots, by_text, lies_in
from xlaserve.files.temporary import remove_leftovers
from xlaserve.model_config.text import parse_json
from xlaserve.residence.repository.directory_reader import DirectoryReader, check_own_files
from xlaserve.residence.repository.exhaustion import read_failure
from xlaserve.residence.repository.fingerprints import Fingerprint, fingerprint_of
from xlaserve.residence.repository.listing import (
    Listing,
    is_model,
    list_root,
    subdirectories,
    unpacked,
)
from xlaserve.residence.repository.names import check_name
from xlaserve.residence.repository.no_version import why_no_version
from xlaserve.residence.repository.overrides import Override
from xlaserve.residence.repository.parts import Part
from xlaserve.residence.repository.remote.part import RemotePart
from xlaserve.residence.repository.remote.remotes import Remotes
from xlaserve.residence.repository.sources import Location, ModelSource
from xlaserve.residence.repository.wrong_root import hint
from xlaserve.serving.access.sight import NOT_IN_REPOSITORY

_MAX_TIDIED = 10_000
"""Maximum number of model directories searched for leftovers at startup."""


class Repository:
    """The model repository: <root>/<model>/ with `config.json|config.pbtxt` and <version>/."""

    def __init__(
        self,
        root: Path,
        *,
        extra_roots: Iterable[Path] = (),
        max_models: int,
        max_config_bytes: int,
        bare_name: str = "",
        remote: RemotePart | None = None,
        others: Sequence[Part] = (),
        remotes: Remotes | None = None,
    ) -> None:
        """`bare_name` is the name under which a root that is itself a model is served.

        Models of the repositories in `others` are found too. With `remote`, the root is that
        object store instead of a directory.
        """
        self.root = root
        self._first: Part = remote or self
        self.parts: tuple[Part, ...] = (self._first, *others)
        """This repository and the others; each is listed and watched separately."""
        self.remotes = remotes or Remotes()
        """The parts in object stores."""
        self._bare_name = bare_name
        # A URL is not a local directory, although it is stored as a Path.
        self._given_roots = (*(() if remote else (root.absolute(),)), *extra_roots)
        self._roots = Roots.of(self._given_roots)
        self._max_models = max_models
        self._max_config_bytes = max_config_bytes
        self._reader = DirectoryReader(root, self._roots, max_config_bytes)

    @property
    def place(self) -> str:
        """Return the directory, as shown in the log."""
        return str(self.root)

    @property
    def confines(self) -> Roots:
        """Return the directories that model files must be in, also after following links."""
        return self._roots

    def listing(self) -> Listing:
        """List the entries of the root; raises OSError unless all could be read."""
        if self._is_bare():
            return Listing((0, 0), (self._bare_name,))
        return list_root(self.root, max_models=self._max_models)

    def names(self) -> list[str]:
        """Return the names of the model directories in all parts, sorted, without hidden ones.

        A root that is missing or unreadable contributes none.
        """
        return sorted({name for part in self.parts for name in _names_of(part)})

    def hint(self, listing: Listing) -> str:
        """Suggest another root if this one has no models."""
        return "" if self._is_bare() else hint(self.root, listing)

    def remove_leftovers(self) -> int:
        """Remove leftovers of killed exports and imports in this part, and return their number."""
        names = _names_of(self)[:_MAX_TIDIED]
        return sum(map(remove_leftovers, (self.root, *map(self.root.joinpath, names))))

    def prepare(self, name: str, config_text: str | None = None) -> None:
        """Prepare a model whose files are in an object store, so that `find` finds it; blocks.

        The stores are not asked for a model that has a local directory, which therefore loads even
        when a store is unavailable. Raises InvalidName, LoadFailed or OutOfSpace.
        """
        check_name("model name", name)
        holders = [part for part in self._holders(name) if self.remotes.at(part.root) is None]
        if not holders:
            self.remotes.prepare(name, config_text)

    def holds(self, name: str) -> bool:
        """Tell whether any part has the model."""
        return bool(self._holders(name))

    def _holders(self, name: str) -> list[Part]:
        return [part for part in self.parts if part.is_holder(name)]

    def is_holder(self, name: str) -> bool:
        """Tell whether this part has a directory for the model."""
        if self._is_bare():
            return name == self._bare_name
        return _is_name(name) and os.path.isdir(self.root / name)  # noqa: PTH112, never raises

    def ambiguity(self, name: str) -> str:
        """Return why a model found in several parts is not served; empty if only one has it."""
        holders = self._holders(name) if len(self.parts) > 1 else []
        places = " and ".join(f"'{part.place}'" for part in holders)
        return f"it is in several repositories, {places}" if len(holders) > 1 else ""

    def url(self, name: str) -> str:
        """Return the directory or URL of a model, whether or not it exists."""
        holders = self._holders(name) if len(self.parts) > 1 else []
        return (holders[0] if holders else self._first).directory(name)

    def directory(self, name: str) -> str:
        """Return the directory of a model in this part, whether or not it exists."""
        return str(self._home(name))

    def _home(self, name: str) -> Path:
        return self.root if name == self._bare_name and self._is_bare() else self.root / name

    def find(
        self, name: str, *, config_text: str | None = None, override: Override | None = None
    ) -> ModelSource:
        """Return the configuration and versions that a load of this model would use.

        `config_text` replaces the configuration on disk, `override` the whole directory. Raises
        ModelNotFound, or LoadFailed if the directory is not a model or several parts have it.
        """
        check_name("model name", name)
        if override is not None:
            return self._find_below(name, config_text, override)
        holders = self._holders(name) if len(self.parts) > 1 else []
        if len(holders) > 1:
            raise LoadFailed(name, self.ambiguity(name))
        return (holders[0] if holders else self._first).find_own(name, config_text)

    def find_own(self, name: str, config_text: str | None) -> ModelSource:
        """Return a model's configuration and versions from this part."""
        return self._find_below(name, config_text, None)

    def _find_below(
        self, name: str, config_text: str | None, override: Override | None
    ) -> ModelSource:
        if override is None and name == self._bare_name and self._is_bare():
            return self._find_bare(config_text)
        directory = override.directory if override else self.root / name
        if not directory.is_dir():
            raise ModelNotFound(name, detail=NOT_IN_REPOSITORY)
        try:
            confined = directory if override else self._roots.confine(directory)
            config = self._reader.config(name, confined, config_text)
            config = self._reader.labelled(
                confined, config, sent=override is not None or config_text is not None
            )
            versions = self._reader.versions(confined, config, sent=override is not None)
            if not versions:
                raise FilesMissing(name, why_no_version(confined))
        except InvalidModel as error:
            raise read_failure(name, str(error), error.__cause__) from error
        except OSError as error:
            reason = f"its files cannot be read: {error.strerror}"
            raise read_failure(name, reason, error) from error
        return ModelSource(name, config, versions)

    def find_at(self, name: str, location: Location) -> ModelSource:
        """Return the configuration and versions at a path within the allowed roots.

        The path is a single version (a directory or a file), or a model directory with numbered
        versions and an optional configuration; the name in it is ignored. A schema replaces the
        inputs and outputs in the configuration. Raises LoadFailed, naming the path (ModelMesh SPI,
        loadModel).
        """
        try:
            path = self._reader.existing(location.path)
            config = self._reader.config_at(path, location.schema)
            versions = self._reader.versions_at(path, config)
        except InvalidModel as error:
            raise read_failure(name, str(error), error.__cause__) from error
        except OSError as error:
            reason = f"'{location.path}' cannot be read: {error.strerror}"
            raise read_failure(name, reason, error) from error
        return ModelSource(name, config, versions)

    def reaches(self, path: str) -> bool:
        """Tell whether a path may be inside the allowed roots, without accessing the disk."""
        place = by_text(path)
        roots = (*self._given_roots, *self._roots.directories)
        return "\0" not in path and any(lies_in(place, root) for root in roots)

    def find_archive(self, name: str, url: str) -> ModelSource:
        """Return the configuration and versions of an unpacked archive, under any name.

        The URL is a path as for `find_at`, or a directory that contains a single model, as in
        archives created inside a model repository. Raises LoadFailed, naming the URL (SageMaker,
        Load Model API).
        """
        try:
            path = unpacked(self._reader.confine_url(url))
        except InvalidModel as error:
            raise read_failure(name, str(error), error.__cause__) from error
        except OSError as error:
            reason = f"'{url}' cannot be read: {error.strerror}"
            raise read_failure(name, reason, error) from error
        return self.find_at(name, Location(str(path)))

    def _is_bare(self) -> bool:
        return bool(self._bare_name) and (
            is_model(self.root) or not any(map(is_model, subdirectories(self.root)))
        )

    def _find_bare(self, config_text: str | None) -> ModelSource:
        found = self.find_at(self._bare_name, Location(str(self.root)))
        if config_text is None:
            return found
        try:
            config = parse_json(config_text, limit_bytes=self._max_config_bytes)
            check_own_files(config)
            config = self._reader.labelled(self._roots.confine(self.root), config, sent=True)
            versions = self._reader.versions_at(self._roots.confine(self.root), config)
        except InvalidModel as error:
            raise LoadFailed(self._bare_name, str(error)) from error
        return ModelSource(self._bare_name, config, versions)

    def fingerprint(self, name: str) -> Fingerprint:
        """Return a fingerprint of a model in this part, without reading its files."""
        return fingerprint_of(self._home(name))


def _names_of(part: Part) -> Sequence[str]:
    try:
        return part.listing().models
    except OSError:
        return ()


def _is_name(name: str) -> bool:
    try:
        check_name("model name", name)
    except InvalidName:
        return False
    return True
