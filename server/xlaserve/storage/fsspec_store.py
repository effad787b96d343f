"""Stores accessed with fsspec: S3, GCS, Azure and Hugging Face, with their SDKs' credentials."""

import base64
import importlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import Any

from xlaserve.storage.attempts import Attempts
from xlaserve.storage.objects import (
    Checksum,
    ObjectChanged,
    ObjectMissing,
    RemoteObject,
    StoreProblem,
    ended_early,
)

_PIECE_BYTES = 8 << 20
_LISTING_TIMES = 10
"""Time limit of a listing, as a multiple of the time limit of one read."""

_WRITING_TIMES = 10
"""Time limit of an upload, as a multiple of that of one read."""

_ABSENT = "it does not exist"
_MARKS = (
    "ETag", "generation", "etag", "blob_id", "content_md5", "LastModified", "last_modified",
    "updated", "created", "mtime",
)  # fmt: skip
"""Object fields that change with the contents; the first field present is used."""

_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "FileNotFoundError": _ABSENT,
        "NoSuchBucket": _ABSENT,
        "RepositoryNotFoundError": _ABSENT,
        "PermissionError": "access is denied",
        "Forbidden": "access is denied",
        "NoCredentialsError": "the SDK found no credentials in its environment",
        "PartialCredentialsError": "the SDK found no credentials in its environment",
        "DefaultCredentialsError": "the SDK found no credentials in its environment",
        "ClientAuthenticationError": "the SDK found no credentials in its environment",
    }
)
"""Permanent errors, by class name, because the classes of an SDK that is not installed cannot be
imported.
"""


def _s3(seconds: float, retries: int) -> Mapping[str, Any]:
    limits = {"connect_timeout": seconds, "read_timeout": seconds}
    return {"config_kwargs": {**limits, "retries": {"max_attempts": retries}}}


def _plain(seconds: float, retries: int) -> Mapping[str, Any]:
    return {}


_OPTIONS: Mapping[str, Callable[[float, int], Mapping[str, Any]]] = MappingProxyType(
    {"s3": _s3, "gs": _plain, "az": _plain, "hf": _plain}
)
"""File system options by scheme, given a timeout in seconds and the number of retries by the SDK.
They include no credentials: each SDK finds its own.
"""


class FsspecStore:
    """Reads objects below a root in an fsspec file system. Blocks."""

    def __init__(
        self,
        filesystem: Any,
        root: str,
        *,
        seconds: float,
        max_objects: int,
        attempts: Attempts | None = None,
    ) -> None:
        self._attempts = attempts or Attempts.one()
        self._filesystem = filesystem
        self._root = root.strip("/")
        self._seconds = seconds
        self._max_objects = max_objects

    @classmethod
    def open(
        cls,
        scheme: str,
        root: str,
        *,
        seconds: float,
        max_objects: int,
        attempts: Attempts | None = None,
    ) -> "FsspecStore":
        """Create the file system for a URL's scheme; the SDK reads its environment."""
        fsspec: Any = importlib.import_module("fsspec")
        # `attempts` are counted: within each, s3fs and botocore would make ten requests to S3.
        sdk_retries = 1 if attempts is None else 0
        options = dict(_OPTIONS[scheme](seconds, sdk_retries))
        # Disable the listings cache: it would hide changes.
        made = fsspec.filesystem(
            scheme, skip_instance_cache=True, use_listings_cache=False, **options
        )
        if not sdk_retries:
            made.retries = 1  # attempts of s3fs, not an option of its constructor
        return cls(made, root, seconds=seconds, max_objects=max_objects, attempts=attempts)

    def objects(self, below: str = "") -> list[RemoteObject]:
        """Return all objects below a prefix; raises StoreProblem."""
        root = f"{self._root}/{below}".rstrip("/")
        self._forget_listings()
        limit = _LISTING_TIMES * self._seconds
        infos = self._ask("find", root, detail=True, seconds=limit)
        if len(infos) > self._max_objects:
            raise StoreProblem(
                f"it has {len(infos)} objects, more than remote_max_objects ({self._max_objects})",
                is_transient=False,
            )
        prefix = f"{self._root}/"
        return [
            _object(str(path).strip("/").removeprefix(prefix) if prefix != "/" else path, info)
            for path, info in infos.items()
            # Web consoles create empty objects to represent directories.
            if info.get("type") == "file" and not str(info.get("name", "")).endswith("/")
        ]

    def read(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """Yield a range of an object's bytes in chunks of some megabytes."""
        path = f"{self._root}/{found.name}"
        while start < stop:
            end = min(start + _PIECE_BYTES, stop)
            with self._attempts.noting():
                piece = self._call("cat_file", path, start=start, end=end)
                if not piece:
                    raise ended_early(found, start)
            if len(piece) > end - start:
                raise StoreProblem(
                    f"'{found.name}' sent {len(piece)} bytes, expected {end - start}",
                    is_transient=False,
                )
            yield piece
            start += len(piece)

    def confirm(self, found: RemoteObject) -> None:
        """Check that an object is unchanged since it was listed; raises ObjectChanged."""
        self._forget_listings()
        info = self._ask("info", f"{self._root}/{found.name}")
        now = _object(found.name, info)
        if (now.mark, now.size_bytes) != (found.mark, found.size_bytes):
            raise ObjectChanged(found.name)

    def failed(self, problem: StoreProblem) -> None:
        """Record why a load failed."""
        self._attempts.failed(problem)

    def find(self, name: str) -> RemoteObject | None:
        """Return an object, or None if it is missing; raises StoreProblem."""
        self._forget_listings()
        try:
            info = self._ask("info", f"{self._root}/{name}")
        except ObjectMissing:
            return None
        return _object(name, info) if info.get("type") == "file" else None

    def write(self, name: str, data: bytes) -> None:
        """Write an object as a whole, replacing an existing one; raises StoreProblem."""
        limit = _WRITING_TIMES * self._seconds
        self._call("pipe_file", f"{self._root}/{name}", data, seconds=limit)

    def look(self) -> None:
        """Request the root once, to test the store."""
        self._forget_listings()
        self._attempts.look(partial(self._call, "info", self._root))

    def _ask(self, name: str, *args: Any, **more: Any) -> Any:
        """Run `_call` with retries."""
        return self._attempts.run(partial(self._call, name, *args, **more))

    def _forget_listings(self) -> None:
        self._filesystem.invalidate_cache()

    def _call(self, name: str, *args: Any, seconds: float | None = None, **more: Any) -> Any:
        """Call a method of the file system, with a timeout; async ones are cancelled on timeout."""
        limit = seconds or self._seconds
        try:
            if getattr(self._filesystem, "async_impl", False):
                asyn: Any = importlib.import_module("fsspec.asyn")
                method = getattr(self._filesystem, f"_{name}")
                return asyn.sync(self._filesystem.loop, method, *args, timeout=limit, **more)
            return getattr(self._filesystem, name)(*args, **more)
        except Exception as error:
            # SDK messages may contain keys or signed URLs; the class name is enough.
            raise _problem(error, limit) from None


def _problem(error: Exception, seconds: float) -> StoreProblem:
    names = [kind.__name__ for kind in type(error).__mro__]
    known = next((_KINDS[name] for name in names if name in _KINDS), "")
    if known == _ABSENT:
        return ObjectMissing(known)
    if known:
        return StoreProblem(known, is_transient=False, is_away=True)
    if "TimeoutError" in names or "ReadTimeoutError" in names:
        return StoreProblem(f"no answer within {seconds:g} seconds (remote_stall_seconds)")
    return StoreProblem(f"its SDK failed with {type(error).__name__}")


def _object(name: str, info: Mapping[str, Any]) -> RemoteObject:
    size = info.get("size")
    if not isinstance(size, int) or size < 0:
        raise StoreProblem(f"'{name[:200]}' has no size", is_transient=False)
    field = next((field for field in _MARKS if info.get(field) is not None), "")
    value = info.get(field, "")
    # Listings may have a number where the object's own metadata has a date.
    mark = str(value.timestamp() if isinstance(value, datetime) else value)
    return RemoteObject(name, size, mark.strip('"'), _checksum(info))


def _checksum(info: Mapping[str, Any]) -> Checksum | None:
    """Return the content hash that a store provides; S3's ETag usually is none."""
    lfs = info.get("lfs")
    sha256 = lfs.get("sha256") if isinstance(lfs, Mapping) else None
    if isinstance(sha256, str):
        return Checksum("sha256", sha256.lower())
    md5 = info.get("md5Hash")  # GCS
    if isinstance(md5, str):
        return Checksum("md5", base64.b64decode(md5).hex())
    return None
