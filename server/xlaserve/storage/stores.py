"""Opens the store for a URL."""

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from xlaserve.storage.attempts import Attempts
from xlaserve.storage.fsspec_store import FsspecStore
from xlaserve.storage.http_store import HttpStore
from xlaserve.storage.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits for reading from a store."""

    stall_seconds: float
    max_objects: int
    threads: int = 1
    """Number of concurrent requests of a listing."""


def open_store(url: str, limits: StoreLimits, attempts: Attempts | None = None) -> ObjectStore:
    """Return the store for a validated URL, without connecting.

    Without `attempts`, requests are not retried.
    """
    parts = urlsplit(url)
    if parts.scheme in ("http", "https"):
        return HttpStore(
            url,
            seconds=limits.stall_seconds,
            max_objects=limits.max_objects,
            threads=limits.threads,
            attempts=attempts,
        )
    root = unquote(f"{parts.netloc}{parts.path}")
    return FsspecStore.open(
        parts.scheme,
        root,
        seconds=limits.stall_seconds,
        max_objects=limits.max_objects,
        attempts=attempts,
    )
