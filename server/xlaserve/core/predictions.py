"""What loads will need, from what others needed: remembered by whatever may name them again."""

import asyncio
import hashlib
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from typing import TypeVar

from xlaserve.errors import XlaserveError

V = TypeVar("V")

LOOK_SECONDS = 0.2
"""How long files may take to be looked at: a mesh waits for half a second, for all."""

_TYPICAL = 0.9
"""The part of all models that need no more than what is predicted for one that nothing is known
of: too small a prediction costs a refused load or an eviction, too large a one only some memory
for the length of a load."""


class Predictions:
    """Needs of loads, in bytes of the fullest device, by the id of the model and by other keys.

    Keeps `limit` ids and three times as many other keys, of which a digest is kept; those that were
    not used for longest go first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: OrderedDict[bytes, int] = OrderedDict()
        self._by_key: OrderedDict[bytes, int] = OrderedDict()
        self._asked: OrderedDict[bytes, bytes] = OrderedDict()
        """Id -> the key of what was last asked for under it."""
        self._ascending: list[int] = []
        """The values of `_by_id`."""

    def remember(self, model_id: str, needed_bytes: int, *keys: Hashable) -> None:
        """Keep what a load needed, which is not forgotten for having been refused."""
        known = _digest(model_id)
        self._forget(self._by_id.pop(known, None))
        self._by_id[known] = needed_bytes
        insort(self._ascending, needed_bytes)
        if len(self._by_id) > self._limit:
            _, size = self._by_id.popitem(last=False)
            self._forget(size)
        asked = self._asked.get(known)
        for key in (*map(_digest, keys), *([asked] if asked else [])):
            _keep(self._by_key, key, needed_bytes, 3 * self._limit)

    def asked(self, model_id: str, key: Hashable) -> None:
        """Note what a mesh calls the files of a model; a puller calls them otherwise in a load."""
        _keep(self._asked, _digest(model_id), _digest(key), self._limit)

    def of_id(self, model_id: str) -> int | None:
        """Return what the last load under this id needed."""
        return _use(self._by_id, _digest(model_id))

    def of_key(self, *keys: Hashable) -> int | None:
        """Return what was needed by the first of these that is known."""
        found = (_use(self._by_key, _digest(key)) for key in keys)
        return next((size for size in found if size is not None), None)

    @property
    def typical_bytes(self) -> int | None:
        """Return the 90th percentile over the ids that are known; None for none."""
        if not self._ascending:
            return None
        return self._ascending[ceil(_TYPICAL * len(self._ascending)) - 1]

    @property
    def largest_bytes(self) -> int:
        """Return the most that any of them needed; 0 for none."""
        return self._ascending[-1] if self._ascending else 0

    def _forget(self, size: int | None) -> None:
        if size is not None:
            del self._ascending[bisect_left(self._ascending, size)]


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """What the files of a model tell."""

    needed_bytes: int
    """What a load of it will need, by their headers."""
    key: Hashable
    """What it shares with models that need the same."""


class FilesLook:
    """Looks at the files of models, one after the other, for a short time each.

    In a thread of its own: a file system that does not answer holds up nothing else, and makes
    predictions worse, not late.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "predict")

    async def __call__(self, look: Callable[[], FilesSeen]) -> FilesSeen | None:
        """Return what `look` does; None where the files are not there, no model, or slow."""
        looking = asyncio.wrap_future(self._thread.submit(look))
        try:
            return await asyncio.wait_for(looking, LOOK_SECONDS)
        except (XlaserveError, OSError, TimeoutError):
            return None

    def close(self) -> None:
        """Look at nothing more; what still looks is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _keep(kept: "OrderedDict[bytes, V]", key: bytes, value: V, limit: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > limit:
        kept.popitem(last=False)


def _use(kept: "OrderedDict[bytes, int]", key: bytes) -> int | None:
    if key in kept:
        kept.move_to_end(key)
    return kept.get(key)


def _digest(key: Hashable) -> bytes:
    """Return some bytes instead of a key, which a client may have made as long as a message."""
    return hashlib.blake2b(repr(key).encode(errors="surrogatepass"), digest_size=16).digest()
