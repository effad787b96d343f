"""A model repository in an object store.

Requests, the index and scans are answered from the last known listing. Only `refresh`, `prepare`
and the fetches of loads access the store; they block, and run in their own threads.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from xlaserve.errors import InvalidModel, InvalidName, ModelNotFound
from xlaserve.files.temporary import TemporaryDirectory
from xlaserve.model_config.config import ModelConfig
from xlaserve.residence.repository.exhaustion import load_failure, store_failure
from xlaserve.residence.repository.fingerprints import Fingerprint
from xlaserve.residence.repository.listing import Listing
from xlaserve.residence.repository.names import check_name, is_version
from xlaserve.residence.repository.sources import ModelSource, RemoteFiles, VersionSource
from xlaserve.storage import skeleton
from xlaserve.storage.cache import Lease, ModelCache
from xlaserve.storage.fetching import FetchControl
from xlaserve.storage.objects import ObjectStore, RemoteObject, Store, StoreProblem, check_names
from xlaserve.storage.units import Wanted

_STRIPES = 16
_NOT_LOOKED = "it has not been read yet"

Objects = tuple[RemoteObject, ...]


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """Limits of one repository in an object store."""

    max_models: int
    fetch_seconds: float


@dataclass(frozen=True, slots=True)
class LocalReading:
    """Functions that read a model from local disk."""

    config: Callable[[Path, str | None], ModelConfig]
    """Returns the configuration from a model's directory, or parsed from a text."""
    find: Callable[[Path, str, str | None], ModelSource]
    """Finds a model in a directory of models by name; the text replaces its configuration."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The local skeleton of a model, and its objects in the store."""

    key: object
    models: Path
    """Directory that contains the skeleton, under the model's name."""
    home: Objects
    versions: Mapping[int, Objects]

    def of_version(self, number: int) -> Objects:
        return tuple(sorted((*self.home, *self.versions.get(number, ())), key=_name))


class RemotePart:
    """A repository below a URL: <url>/<model>/ with a configuration, and <version>/."""

    def __init__(
        self,
        root: Path,
        url: str,
        open_store: Callable[[], ObjectStore],
        *,
        cache: ModelCache,
        reading: LocalReading,
        limits: RemoteLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`root` is the URL in the form of a path. The store is opened at its first use."""
        self.root = root
        self.url = url.rstrip("/")
        self._open_store = open_store
        self._cache = cache
        self._reading = reading
        self._limits = limits
        self._clock = clock
        self._store: ObjectStore | None = None
        self._asking = threading.Lock()
        """Serializes listings."""
        self._preparing = tuple(threading.Lock() for _ in range(_STRIPES))
        """Locks that serialize the preparations of a model, selected by the hash of its name."""
        self._changing = threading.Lock()
        """Held while state changes, but never during a request to the store."""
        self._listed_at: float | None = None
        self._listing: Listing | None = None
        self._objects: Mapping[str, Objects] = {}
        self._problem = _NOT_LOOKED
        self._prepared: dict[str, _Prepared] = {}
        self._skeletons: TemporaryDirectory | None = None
        self._numbered = 0

    # --- Access to the store ---

    def refresh(self, older_than_seconds: float = 0.0) -> None:
        """List the store, unless the last listing is younger than this many seconds; blocks.

        If the store cannot be listed, the known models are kept, and `listing` raises.
        """
        with self._asking:
            listed_at, now = self._listed_at, self._clock()
            if listed_at is not None and now - listed_at < older_than_seconds:
                return
            try:
                objects = self._opened().objects()
                with self._changing:
                    self._take_listing(objects)
                self._problem = ""
            except StoreProblem as problem:
                self._problem = str(problem)
            self._listed_at = self._clock()

    def prepare(self, name: str, config_text: str | None = None) -> None:
        """List one model and write its skeleton to disk for `find_own`; blocks.

        Raises LoadFailed or OutOfSpace. A model missing from the store loses its skeleton.
        """
        try:
            with self._preparing[hash(name) % _STRIPES]:
                self._prepare(name, config_text)
        except InvalidModel as error:
            raise load_failure(name, str(error), error.__cause__) from error
        except StoreProblem as problem:
            url = self.directory(name)
            raise store_failure(name, f"{url} cannot be read: {problem}", problem) from problem
        except OSError as error:
            reason = f"its files cannot be written: {error.strerror}"
            raise load_failure(name, reason, error) from error

    def check(self) -> None:
        """Check that the store answers; ignores errors, which are reported elsewhere."""
        with suppress(StoreProblem):
            self._opened().look()

    def close(self) -> None:
        """Remove the skeletons from disk."""
        if self._skeletons is not None:
            self._skeletons.remove()

    def _opened(self) -> ObjectStore:
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def _take_listing(self, objects: Iterable[RemoteObject]) -> None:
        models: dict[str, list[RemoteObject]] = {}
        skipped: dict[str, str] = {}
        for found in objects:
            name, separator, _ = found.name.partition("/")
            if name.startswith("."):
                continue
            reason = _fault_of(name) if separator else "it is an object, expected a directory"
            if reason:
                skipped[name[:200]] = reason
            else:
                models.setdefault(name, []).append(found)
        names = sorted(models)
        most = self._limits.max_models
        skipped |= dict.fromkeys(
            names[most:], f"it exceeds the limit of {most} models (max_models)"
        )
        self._objects = {name: tuple(sorted(models[name], key=_name)) for name in names[:most]}
        for name in self._prepared.keys() - self._objects.keys():
            self._forget(self._prepared.pop(name))
        self._listing = Listing((0, 0), tuple(names[:most]), skipped)

    def _prepare(self, name: str, config_text: str | None) -> None:
        prefix = f"{name}/"
        objects = tuple(
            sorted(
                (
                    replace(found, name=found.name.removeprefix(prefix))
                    for found in self._opened().objects(name)
                    if found.name.startswith(prefix)
                ),
                key=_name,
            )
        )
        key = (objects, config_text)
        before = self._prepared.get(name)
        if objects and before is not None and before.key == key:
            return
        made: _Prepared | None = None
        if objects:
            check_names(objects)
            made = self._make(name, objects, config_text, key)
        with self._changing:
            before = self._prepared.pop(name, None)
            if made is not None:
                self._prepared[name] = made
        self._forget(before)

    def _make(self, name: str, objects: Objects, text: str | None, key: object) -> _Prepared:
        home, versions = _split(objects)
        smallest = min((_size(found) for found in versions.values()), default=0)
        self._cache.check_size(_size(home) + smallest)
        control = self._control()
        made = _Prepared(key, self._fresh(), home, versions)
        directory = made.models / name
        leases = {number: self._held(name, made, number) for number in versions or (0,)}
        try:
            reads = {
                number: skeleton.from_files(lease.path) for number, lease in leases.items() if lease
            }
            fetched = skeleton.from_store(_Below(self._opened(), name), control)
            directory.mkdir(mode=0o700)
            skeleton.write_home(directory, home, next(iter(reads.values()), fetched))
            for number in versions:
                (directory / str(number)).mkdir(mode=0o700)
            config = self._reading.config(directory, text)
            for number in config.version_policy.select(
                {number: directory / str(number) for number in versions}
            ):
                read = reads.get(number, fetched)
                skeleton.write_version(directory, versions[number], read)
        except BaseException:
            self._forget(made)
            raise
        finally:
            for lease in leases.values():
                if lease is not None:
                    lease.close()
        return made

    def _fresh(self) -> Path:
        with self._changing:
            if self._skeletons is None:
                self._skeletons = TemporaryDirectory(self._cache.directory)
            self._numbered += 1
            path = self._skeletons.path / str(self._numbered)
        path.mkdir(mode=0o700)
        return path

    def _forget(self, prepared: _Prepared | None) -> None:
        if prepared is not None:
            shutil.rmtree(prepared.models, ignore_errors=True)

    def _control(self) -> FetchControl:
        return FetchControl(self._limits.fetch_seconds, self._cache.counts)

    def _wanted(self, name: str, prepared: _Prepared, number: int) -> Wanted:
        return Wanted(name, self.directory(name), prepared.of_version(number))

    def _held(self, name: str, prepared: _Prepared, number: int) -> Lease | None:
        return self._cache.held(self._wanted(name, prepared, number))

    # --- Queries without access to the store ---

    @property
    def place(self) -> str:
        """Return the URL."""
        return self.url

    @property
    def is_listed(self) -> bool:
        """Tell whether the store was ever listed successfully."""
        return self._listing is not None

    @property
    def problem(self) -> str:
        """Return why the last `refresh` failed; empty if it succeeded."""
        return self._problem

    def listing(self) -> Listing:
        """Return the listing of the last `refresh`; raises OSError if it failed."""
        if self._problem or self._listing is None:
            raise StoreProblem(self._problem)
        return self._listing

    def fingerprint(self, name: str) -> Fingerprint:
        """Return the identities of a model's objects at the last `refresh`."""
        return tuple(_mark(found) for found in self._objects.get(name, ()))

    def hint(self, listing: Listing) -> str:
        """Return no hint, since finding one would cost requests."""
        return ""

    def is_holder(self, name: str) -> bool:
        """Tell whether the store has this model, according to the last listing or `prepare`."""
        return name in self._objects or name in self._prepared

    def directory(self, name: str) -> str:
        """Return the URL of a model."""
        return f"{self.url}/{name}"

    def remove_leftovers(self) -> int:
        """Do nothing, since the objects in a store do not belong to this machine."""
        return 0

    def find_own(self, name: str, config_text: str | None) -> ModelSource:
        """Return a model's configuration and versions from its skeleton."""
        prepared = self._prepared.get(name)
        if prepared is None:
            raise ModelNotFound(name, detail="is not in the model repository, failed to load it")
        found = self._reading.find(prepared.models, name, config_text)
        versions = (self._version(found, source, prepared) for source in found.versions)
        return replace(found, versions=tuple(versions))

    def _version(
        self, found: ModelSource, source: VersionSource, prepared: _Prepared
    ) -> VersionSource:
        number = source.number if source.number in prepared.versions else 0
        wanted = self._wanted(found.name, prepared, number)
        take = partial(self._cache.take, _Below(self._opened(), found.name), wanted)
        # The same files under another configuration or name are a different version.
        mark = (wanted.url, found.config, tuple(map(_mark, wanted.objects)))
        files = RemoteFiles(wanted.url, take, self._control)
        return replace(source, fingerprint=mark, remote=files)


class _Below:
    """A view of a store with object names relative to one model."""

    def __init__(self, store: Store, model: str) -> None:
        self._store = store
        self._prefix = f"{model}/"

    def objects(self, below: str = "") -> list[RemoteObject]:
        return self._store.objects(f"{self._prefix}{below}")

    def read(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        return self._store.read(self._of(found), start, stop)

    def confirm(self, found: RemoteObject) -> None:
        self._store.confirm(self._of(found))

    def failed(self, problem: StoreProblem) -> None:
        self._store.failed(problem)

    def _of(self, found: RemoteObject) -> RemoteObject:
        return replace(found, name=f"{self._prefix}{found.name}")


def _name(found: RemoteObject) -> str:
    return found.name


def _size(objects: Iterable[RemoteObject]) -> int:
    return sum(found.size_bytes for found in objects)


def _mark(found: RemoteObject) -> tuple[str, int, str]:
    return found.name, found.size_bytes, found.mark


def _split(objects: Objects) -> tuple[Objects, Mapping[int, Objects]]:
    """Split objects into those outside version directories, and those of each version."""
    home: list[RemoteObject] = []
    versions: dict[int, list[RemoteObject]] = {}
    for found in objects:
        first, separator, _ = found.name.partition("/")
        if separator and is_version(first):
            versions.setdefault(int(first), []).append(found)
        else:
            home.append(found)
    return tuple(home), {number: tuple(below) for number, below in versions.items()}


def _fault_of(name: str) -> str:
    try:
        check_name("model name", name)
    except InvalidName as error:
        return str(error)
    return ""
