"""One model repository in a store, as a part of the repository.

What is asked of it on the way of a request, an index or a look is answered from what the store said
last; only `refresh`, `prepare` and the fetches of loads ask the store. They block, in threads of
their own.
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
    """The limits of one repository in a store."""

    max_models: int
    fetch_seconds: float


@dataclass(frozen=True, slots=True)
class LocalReading:
    """How a model is read once its files are on the disk."""

    config: Callable[[Path, str | None], ModelConfig]
    """Returns the configuration of a model's directory, or that of a text."""
    find: Callable[[Path, str, str | None], ModelSource]
    """Finds a model by its name in a directory of models, with a text as configuration."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Skeleton of a model, and its objects in the store."""

    key: object
    models: Path
    """Holds the skeleton, under the name of the model."""
    home: Objects
    versions: Mapping[int, Objects]

    def of_version(self, number: int) -> Objects:
        return tuple(sorted((*self.home, *self.versions.get(number, ())), key=_name))


class RemotePart:
    """The models below a URL: <url>/<model>/ with a configuration, and <version>/."""

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
        """`root` is the path that holds the URL; the store is opened when it is first asked."""
        self.root = root
        self.url = url.rstrip("/")
        self._open_store = open_store
        self._cache = cache
        self._reading = reading
        self._limits = limits
        self._clock = clock
        self._store: ObjectStore | None = None
        self._asking = threading.Lock()
        """One listing at a time."""
        self._preparing = tuple(threading.Lock() for _ in range(_STRIPES))
        """One preparation of a model at a time: its name picks the lock."""
        self._changing = threading.Lock()
        """Held while state changes, and never during a request to the store."""
        self._asked_at: float | None = None
        self._listing: Listing | None = None
        self._objects: Mapping[str, Objects] = {}
        self._problem = _NOT_LOOKED
        self._prepared: dict[str, _Prepared] = {}
        self._skeletons: TemporaryDirectory | None = None
        self._numbered = 0

    # --- requests to the store ---

    def refresh(self, older_than_seconds: float = 0.0) -> None:
        """List the store, unless that was done since so many seconds; blocks.

        A store that cannot be listed changes nothing of what is known; `listing` raises then.
        """
        with self._asking:
            asked, now = self._asked_at, self._clock()
            if asked is not None and now - asked < older_than_seconds:
                return
            try:
                objects = self._opened().objects()
                with self._changing:
                    self._take_listing(objects)
                self._problem = ""
            except StoreProblem as problem:
                self._problem = str(problem)
            self._asked_at = self._clock()

    def prepare(self, name: str, config_text: str | None = None) -> None:
        """List one model, and have its skeleton on the disk for `find_own`; blocks.

        Raises LoadFailed, or OutOfSpace. One that is not there has none afterwards.
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

    def look(self) -> None:
        """Test the store; errors of opening it are reported elsewhere."""
        with suppress(StoreProblem):
            self._opened().look()

    def close(self) -> None:
        """Remove the skeletons."""
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

    # --- what it is asked ---

    @property
    def place(self) -> str:
        """Return the URL."""
        return self.url

    @property
    def is_listed(self) -> bool:
        """Tell whether the store was ever listed."""
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
        """Return the marks of a model's objects, as the last `refresh` saw them."""
        return tuple(_mark(found) for found in self._objects.get(name, ()))

    def hint(self, listing: Listing) -> str:
        """Return no hint: it would cost requests."""
        return ""

    def is_holder(self, name: str) -> bool:
        """Tell whether the store has this model, as far as it was asked."""
        return name in self._objects or name in self._prepared

    def directory(self, name: str) -> str:
        """Return the URL of a model."""
        return f"{self.url}/{name}"

    def remove_leftovers(self) -> int:
        """Do nothing: a store's objects do not belong to this machine."""
        return 0

    def find_own(self, name: str, config_text: str | None) -> ModelSource:
        """Read the sources of a load, from the skeleton."""
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
        # The same files under another configuration are another version; so are others of a name.
        mark = (wanted.url, found.config, tuple(map(_mark, wanted.objects)))
        files = RemoteFiles(wanted.url, take, self._control)
        return replace(source, fingerprint=mark, remote=files)


class _Below:
    """A store whose objects are named relative to a model."""

    def __init__(self, store: Store, model: str) -> None:
        self._store = store
        self._prefix = f"{model}/"

    def objects(self, below: str = "") -> list[RemoteObject]:
        return self._store.objects(f"{self._prefix}{below}")

    def read(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        return self._store.read(self._of(found), start, stop)

    def confirm(self, found: RemoteObject) -> None:
        self._store.confirm(self._of(found))

    def _of(self, found: RemoteObject) -> RemoteObject:
        return replace(found, name=f"{self._prefix}{found.name}")


def _name(found: RemoteObject) -> str:
    return found.name


def _size(objects: Iterable[RemoteObject]) -> int:
    return sum(found.size_bytes for found in objects)


def _mark(found: RemoteObject) -> tuple[str, int, str]:
    return found.name, found.size_bytes, found.mark


def _split(objects: Objects) -> tuple[Objects, Mapping[int, Objects]]:
    """Split objects into those beside the versions and those of each version."""
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
