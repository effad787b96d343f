"""Predicts the memory of loads from earlier loads of the same files or model id."""

import asyncio
import hashlib
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

import structlog

from xlaserve.errors import XlaserveError
from xlaserve.errors.panics import answering

K = TypeVar("K")
V = TypeVar("V")

READ_SECONDS = 0.2
"""Time limit for reading a model's files, in seconds: a mesh waits half a second for a
prediction."""

_TYPICAL = 0.9
"""Quantile of earlier needs that is predicted for an unknown model. Too low a prediction costs a
rejected load or an eviction; too high a one only reserves memory during the load."""


@dataclass(frozen=True, slots=True)
class _Need:
    size_bytes: int
    refused: bool


class Predictions:
    """The memory that loads needed, in bytes on the fullest device, by model id and by other keys.

    Keeps digests of `limit` ids and of three times as many other keys, and drops the least recently
    used ones.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: OrderedDict[bytes, _Need] = OrderedDict()
        self._by_key: OrderedDict[bytes, int] = OrderedDict()
        self._requested_keys: OrderedDict[bytes, bytes] = OrderedDict()
        """Digest of an id -> digest of the key of its last prediction."""
        self._ascending: list[int] = []
        """Needs of the successful loads in `_by_id`, ascending. Rejected loads are excluded: their
        need may exceed all memory, and says nothing about other models."""

    def remember(
        self, model_id: str, needed_bytes: int, *keys: Hashable, refused: bool = False
    ) -> None:
        """Record how much memory a load needed, even if it was rejected."""
        known = _digest(model_id)
        self._uncount(self._by_id.pop(known, None))
        self._by_id[known] = _Need(needed_bytes, refused)
        if not refused:
            insort(self._ascending, needed_bytes)
        if len(self._by_id) > self._limit:
            _, need = self._by_id.popitem(last=False)
            self._uncount(need)
        for key in self._keys(known, keys):
            keep(self._by_key, key, needed_bytes, 3 * self._limit)

    def forget(self, model_id: str, *keys: Hashable) -> None:
        """Forget a model under its id and all of its keys."""
        known = _digest(model_id)
        self._uncount(self._by_id.pop(known, None))
        for key in self._keys(known, keys):
            self._by_key.pop(key, None)

    def note_request(self, model_id: str, key: Hashable) -> None:
        """Record the key of a mesh's request for a prediction; the load may use another key."""
        keep(self._requested_keys, _digest(model_id), _digest(key), self._limit)

    def of_id(self, model_id: str) -> int | None:
        """Return how much the last load with this id needed."""
        need = _use(self._by_id, _digest(model_id))
        return need.size_bytes if need else None

    def of_key(self, *keys: Hashable) -> int | None:
        """Return the need recorded under the first of these keys that is known."""
        found = (_use(self._by_key, _digest(key)) for key in keys)
        return next((size for size in found if size is not None), None)

    @property
    def typical_bytes(self) -> int | None:
        """Return the 90th percentile of the recorded needs; None if there are none."""
        if not self._ascending:
            return None
        return self._ascending[ceil(_TYPICAL * len(self._ascending)) - 1]

    @property
    def largest_bytes(self) -> int:
        """Return the largest recorded need of a successful load; 0 if there is none."""
        return self._ascending[-1] if self._ascending else 0

    def _keys(self, known: bytes, keys: Iterable[Hashable]) -> list[bytes]:
        requested = self._requested_keys.get(known)
        return [*map(_digest, keys), *([requested] if requested else [])]

    def _uncount(self, need: "_Need | None") -> None:
        if need is not None and not need.refused:
            del self._ascending[bisect_left(self._ascending, need.size_bytes)]


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """Facts read from the headers of a model's files."""

    needed_bytes: int
    """Bytes that a load needs on the fullest device."""
    key: Hashable
    """A key that is equal for models with equal memory needs."""


class FileReader:
    """Reads headers of model files, one model at a time, each within a time limit.

    Runs in its own thread, so that a hung file system blocks nothing else: predictions then become
    less accurate, but not late.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "predict")
        self._log = structlog.get_logger("runtime")

    async def __call__(self, read: Callable[[], FilesSeen]) -> FilesSeen | None:
        """Return the result of `read`, or None if files are missing, invalid or too slow."""
        reading = asyncio.wrap_future(self._thread.submit(answering(read)))
        try:
            return await asyncio.wait_for(reading, READ_SECONDS)
        except (XlaserveError, OSError, TimeoutError):
            return None
        except Exception:
            # A load must not fail because its prediction did.
            self._log.exception("model files not read")
            return None

    def close(self) -> None:
        """Stop reading, without waiting for a read in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def keep(kept: "OrderedDict[K, V]", key: K, value: V, limit: int) -> None:
    """Store a value as the newest entry, and drop the oldest beyond `limit`."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > limit:
        kept.popitem(last=False)


def _use(kept: "OrderedDict[bytes, V]", key: bytes) -> V | None:
    if key in kept:
        kept.move_to_end(key)
    return kept.get(key)


def _digest(key: Hashable) -> bytes:
    """Return a fixed-size digest of a key, whose length clients choose."""
    return hashlib.blake2b(repr(key).encode(errors="surrogatepass"), digest_size=16).digest()
