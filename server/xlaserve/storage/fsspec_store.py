"""Stores that fsspec knows: S3, GCS, Azure and Hugging Face, each with its SDK's credentials."""

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
)

_PIECE_BYTES = 8 << 20
_LISTING_TIMES = 10
"""Time limit of a listing, as a multiple of one part's."""

_WRITING_TIMES = 10
"""Time limit of an upload, likewise: it is a single request."""

_ABSENT = "it does not exist"
_MARKS = (
    "ETag", "generation", "etag", "blob_id", "content_md5", "LastModified", "last_modified",
    "updated", "created", "mtime",
)  # fmt: skip
"""Fields of an object that change with it; the first that a store gives counts."""

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
"""Errors that no further attempt will change, by the name of their class: an SDK that is not
installed has no classes to compare with."""


def _s3(seconds: float) -> Mapping[str, Any]:
    limits = {"connect_timeout": seconds, "read_timeout": seconds, "retries": {"max_attempts": 1}}
    return {"config_kwargs": limits}


def _plain(seconds: float) -> Mapping[str, Any]:
    return {}


_OPTIONS: Mapping[str, Callable[[float], Mapping[str, Any]]] = MappingProxyType(
    {"s3": _s3, "gs": _plain, "az": _plain, "hf": _plain}
)
"""Specific file system options by scheme, for a timeout in seconds. Credentials are not among them:
each SDK finds its own.
"""


class FsspecStore:
    """Reads objects below a root of a file system of fsspec. Blocks."""

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
        """Create the file system from the scheme's extra; the SDK reads its environment."""
        fsspec: Any = importlib.import_module("fsspec")
        options = dict(_OPTIONS[scheme](seconds))
        # A listing that is remembered would hide every change.
        made = fsspec.filesystem(
            scheme, skip_instance_cache=True, use_listings_cache=False, **options
        )
        return cls(made, root, seconds=seconds, max_objects=max_objects, attempts=attempts)

    def objects(self, below: str = "") -> list[RemoteObject]:
        """Return all objects below a name; raises StoreProblem."""
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
            # Consoles make empty objects that look like directories.
            if info.get("type") == "file" and not str(info.get("name", "")).endswith("/")
        ]

    def read(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes of a part of an object, some megabytes at a time."""
        path = f"{self._root}/{found.name}"
        while start < stop:
            end = min(start + _PIECE_BYTES, stop)
            with self._attempts.noting():
                piece = self._call("cat_file", path, start=start, end=end)
            if not piece:
                raise StoreProblem(f"'{found.name}' ended at byte {start} of {found.size_bytes}")
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

    def find(self, name: str) -> RemoteObject | None:
        """Return an object, or None if it is missing; raises StoreProblem."""
        self._forget_listings()
        try:
            info = self._ask("info", f"{self._root}/{name}")
        except ObjectMissing:
            return None
        return _object(name, info) if info.get("type") == "file" else None

    def write(self, name: str, data: bytes) -> None:
        """Put an object whole, in place of one of this name; raises StoreProblem."""
        limit = _WRITING_TIMES * self._seconds
        self._call("pipe_file", f"{self._root}/{name}", data, seconds=limit)

    def look(self) -> None:
        """Ask for the root, once."""
        self._forget_listings()
        self._attempts.look(partial(self._call, "info", self._root))

    def _ask(self, name: str, *args: Any, **more: Any) -> Any:
        """Do as `_call`, in several attempts."""
        return self._attempts.run(partial(self._call, name, *args, **more))

    def _forget_listings(self) -> None:
        self._filesystem.invalidate_cache()

    def _call(self, name: str, *args: Any, seconds: float | None = None, **more: Any) -> Any:
        """Call a method of the file system; one that can be cancelled is, when its time is over."""
        limit = seconds or self._seconds
        try:
            if getattr(self._filesystem, "async_impl", False):
                asyn: Any = importlib.import_module("fsspec.asyn")
                method = getattr(self._filesystem, f"_{name}")
                return asyn.sync(self._filesystem.loop, method, *args, timeout=limit, **more)
            return getattr(self._filesystem, name)(*args, **more)
        except Exception as error:
            # What an SDK says may hold a key or a signed URL: its class tells enough.
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
    # A listing may have as a number what the object itself has as a date.
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
