"""Predicts the memory of loads from earlier loads of the same files or id."""

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

LOOK_SECONDS = 0.2
"""Limit of reading files in seconds: a mesh waits for half a second in all."""

_TYPICAL = 0.9
"""The part of all models that need no more than what is predicted for one that nothing is known
of: too small a prediction costs a refused load or an eviction, too large a one only some memory
for the length of a load."""


@dataclass(frozen=True, slots=True)
class _Need:
    size_bytes: int
    refused: bool


class Predictions:
    """Needs of loads, in bytes of the fullest device, by the id of the model and by other keys.

    Keeps `limit` ids and three times as many other keys, of which a digest is kept; those that were
    not used for longest go first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: OrderedDict[bytes, _Need] = OrderedDict()
        self._by_key: OrderedDict[bytes, int] = OrderedDict()
        self._asked: OrderedDict[bytes, bytes] = OrderedDict()
        """Id -> the key of its last prediction."""
        self._ascending: list[int] = []
        """Bytes that those of `_by_id` needed that were loaded; one that was refused may exceed
        all memory, and says nothing of others."""

    def remember(
        self, model_id: str, needed_bytes: int, *keys: Hashable, refused: bool = False
    ) -> None:
        """Record the need of a load, even of a refused one."""
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
        """Forget a model, under all of its keys."""
        known = _digest(model_id)
        self._uncount(self._by_id.pop(known, None))
        for key in self._keys(known, keys):
            self._by_key.pop(key, None)

    def asked(self, model_id: str, key: Hashable) -> None:
        """Record a mesh's name for a model's files; a puller's load has another one."""
        keep(self._asked, _digest(model_id), _digest(key), self._limit)

    def of_id(self, model_id: str) -> int | None:
        """Return the need of the last load with this id."""
        need = _use(self._by_id, _digest(model_id))
        return need.size_bytes if need else None

    def of_key(self, *keys: Hashable) -> int | None:
        """Return the need under the first known key."""
        found = (_use(self._by_key, _digest(key)) for key in keys)
        return next((size for size in found if size is not None), None)

    @property
    def typical_bytes(self) -> int | None:
        """Return the 90th percentile of needs; None without loads."""
        if not self._ascending:
            return None
        return self._ascending[ceil(_TYPICAL * len(self._ascending)) - 1]

    @property
    def largest_bytes(self) -> int:
        """Return the most that any of those needed; 0 for none."""
        return self._ascending[-1] if self._ascending else 0

    def _keys(self, known: bytes, keys: Iterable[Hashable]) -> list[bytes]:
        asked = self._asked.get(known)
        return [*map(_digest, keys), *([asked] if asked else [])]

    def _uncount(self, need: "_Need | None") -> None:
        if need is not None and not need.refused:
            del self._ascending[bisect_left(self._ascending, need.size_bytes)]


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """The facts that the files of a model tell."""

    needed_bytes: int
    """The memory that a load needs, by their headers, in bytes by device."""
    key: Hashable
    """Key shared by models with equal needs."""


class FilesLook:
    """Looks at the files of models, one after the other, for a short time each.

    In a thread of its own: a file system that does not answer holds up nothing else, and makes
    predictions worse, not late.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "predict")
        self._log = structlog.get_logger("runtime")

    async def __call__(self, look: Callable[[], FilesSeen]) -> FilesSeen | None:
        """Return the result of `look`; None if files are missing, invalid or slow."""
        looking = asyncio.wrap_future(self._thread.submit(answering(look)))
        try:
            return await asyncio.wait_for(looking, LOOK_SECONDS)
        except (XlaserveError, OSError, TimeoutError):
            return None
        except Exception:
            # A prediction is worse without it; a load must not fail for it.
            self._log.exception("model files not read")
            return None

    def close(self) -> None:
        """Stop reading, without waiting for running reads."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def keep(kept: "OrderedDict[K, V]", key: K, value: V, limit: int) -> None:
    """Keep a value as the newest of at most `limit`; the oldest goes."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > limit:
        kept.popitem(last=False)


def _use(kept: "OrderedDict[bytes, V]", key: bytes) -> V | None:
    if key in kept:
        kept.move_to_end(key)
    return kept.get(key)


def _digest(key: Hashable) -> bytes:
    """Return a fixed-size digest of a key, which clients may make long."""
    return hashlib.blake2b(repr(key).encode(errors="surrogatepass"), digest_size=16).digest()
