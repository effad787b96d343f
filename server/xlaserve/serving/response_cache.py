"""The response cache: answers that may be repeated, bounded in bytes.

A key holds all that an answer depends on: the inputs with their shapes, bit by bit, the outputs
that are asked for and the parameters of the request. It holds the caller too, as an answer that
comes sooner tells that somebody has asked this before. Short inputs are in it as they are, of
longer ones the SHA-256: nobody can make two requests that are taken for one another.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Self, TypeAlias

import msgspec
import numpy as np

from xlaserve.net.ledger import Kind, Ledger
from xlaserve.runtime.handling import NO_TENSOR_PARAMETERS
from xlaserve.serving.infer_call import InferCall, ServedInstance
from xlaserve.serving.inference import InferOutput
from xlaserve.serving.uses import Use
from xlaserve.tensors import Parameter, Tensor, pack_bytes

MOST_EXACT_BYTES = 2048
"""Longest inputs kept verbatim in a key: comparing them is as quick as a hash."""

ENTRY_BYTES = 1024
"""Overhead of an entry, besides its tensors and its key."""

MOST_MESSAGE_BYTES = 4096
"""Longest requests whose answers are kept as they were written: of longer ones to make the key
takes most of the time in any case."""
_MOST_MESSAGES = 4
"""Limit of encoded answers kept per entry, one for each request message."""
_WRITTEN_BYTES = 512
"""Bytes of the objects of one of these, besides the request and the answer."""

_NO_EFFECT = frozenset({"priority", "timeout", "binary_data_output"})
"""Parameters that affect when and how a request is answered, not the outputs."""

Key: TypeAlias = tuple[Hashable, ...]


def input_bytes(call: InferCall) -> int:
    """Return how many bytes `key_of` reads."""
    return sum([_size(t) if t.dtype.hasobject else t.nbytes for t in call.inputs.values()])


def key_of(call: InferCall, names: Sequence[str]) -> Key:
    """Return what the answer to a call depends on, `names` being the inputs of its model.

    Raises TensorDataError for elements of BYTES that are none.
    """
    inputs = call.inputs
    parts: list[Hashable] = [
        call.owner,
        call.chosen and tuple([spec.name for spec in call.chosen]),
        _said(call.parameters) if call.parameters else (),
    ]
    if call.tensor_parameters is not NO_TENSOR_PARAMETERS:
        parts += [
            tuple([(name, _said(of_tensor)) for name, of_tensor in sorted(found.items())])
            for found in call.tensor_parameters
        ]
    for name in names:
        tensor = inputs.get(name)
        if tensor is None:
            parts.append(None)
            continue
        data = pack_bytes(tensor) if tensor.dtype.hasobject else tensor
        parts.append(tensor.shape)
        parts.append(_bits(data))
    return tuple(parts)


def _said(parameters: Mapping[str, Parameter]) -> Hashable:
    """Return parameters as text: 1, 1.0 and true are equal, and so are 0.0 and -0.0."""
    return tuple(sorted((k, repr(v)) for k, v in parameters.items() if k not in _NO_EFFECT))


def _bits(data: Tensor | bytes | memoryview) -> Hashable:
    """Return bytes, or their hash, which has another type."""
    size = len(data) if isinstance(data, bytes) else data.nbytes
    if size <= MOST_EXACT_BYTES:
        return data if isinstance(data, bytes) else data.tobytes()
    if not isinstance(data, np.ndarray):
        return size, hashlib.sha256(data).digest()
    # As bytes every datatype can be viewed, also bfloat16.
    return size, hashlib.sha256(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data).digest()


class Entry:
    """A cached answer."""

    __slots__ = ("key", "messages", "outputs", "section", "size", "uses")

    def __init__(
        self,
        section: "Section",
        key: Key,
        outputs: tuple[InferOutput, ...],
        size: int,
        uses: frozenset[Use] = frozenset(),
    ) -> None:
        self.section = section
        self.key = key
        self.outputs = outputs
        self.size = size
        """Its charged bytes."""
        self.uses = uses
        """The other models that it was made with."""
        self.messages: list[tuple[str, bytes]] = []
        """Owners and messages of its encoded answers; changed by the cache."""


class Written(msgspec.Struct, frozen=True):
    """An answer as a transport has written it, for requests of the same bytes."""

    entry: Entry
    instance: ServedInstance
    """The instance that computed it."""
    model: str
    version: str
    """Requested version; empty for the newest."""
    rows: int
    answer: bytes


class ResponseCache:
    """The answers of all models together, up to a limit; of the event loop alone.

    The one that was not asked for longest is evicted. Its bytes are on the ledger, and all of them
    are given back when that is under pressure: requests come first.
    """

    def __init__(self, limit: int, ledger: Ledger) -> None:
        self.limit = limit
        self.evictions = 0
        """Answers evicted for others, or under pressure."""
        self._ledger = ledger
        self._account = ledger.open()
        self._entries: OrderedDict[Entry, None] = OrderedDict()
        """The one that was asked for last is the last."""
        self.written: dict[tuple[str, bytes], Written] = {}
        """Keyed by owner and bytes of requests; of entries that are kept, and leaves with them."""
        ledger.on_pressure(self.clear)

    @classmethod
    def of(cls, most_bytes: int, ledger: Ledger) -> Self | None:
        """Return a cache with a size limit; None for 0."""
        return cls(most_bytes, ledger) if most_bytes else None

    @property
    def held(self) -> int:
        """Return how many bytes are kept."""
        return self._account.held

    def __len__(self) -> int:
        return len(self._entries)

    def section(self) -> "Section":
        """Return the section of a loaded instance's answers."""
        return Section(self)

    def clear(self) -> None:
        """Drop everything."""
        self.evictions += len(self._entries)
        while self._entries:
            self._drop(next(iter(self._entries)))

    # --- answers as they were written ---

    def find_written(self, owner: str, message: bytes) -> Written | None:
        """Return the answer to a request of the same bytes and caller; None for none."""
        return self.written.get((owner, message))

    def keep_written(self, call: InferCall, message: bytes, version: str, answer: bytes) -> None:
        """Keep the answer to a call as it was written, for as long as its entry is kept."""
        entry, key = call.kept, (call.owner, message)
        if (
            not isinstance(entry, Entry)
            or entry not in self._entries
            or key in self.written
            or len(entry.messages) >= _MOST_MESSAGES
        ):
            return
        size = _WRITTEN_BYTES + len(message) + len(answer)
        if not self.admits(entry.size + size):
            return
        self.touch(entry)
        while self.held + size > self.limit:  # the entry itself is the last, and fits alone
            self._evict()
        entry.size += size
        entry.messages.append(key)
        self._account.hold(size, Kind.CACHED)
        self.written[key] = Written(entry, call.instance, call.model, version, call.rows, answer)

    # --- as sections call it ---

    def touch(self, entry: Entry) -> None:
        """Record a request for an answer."""
        self._entries.move_to_end(entry)

    def admits(self, size: int) -> bool:
        """Tell whether an answer of this size may be kept: never under pressure."""
        return size <= self.limit and not self._ledger.is_pressed

    def add(self, entry: Entry) -> None:
        """Keep an answer, evicting others."""
        while self._entries and self.held + entry.size > self.limit:
            self._evict()
        self._entries[entry] = None
        entry.section.entries[entry.key] = entry
        self._account.hold(entry.size, Kind.CACHED)

    def remove(self, entries: Sequence[Entry]) -> None:
        """Drop invalid answers."""
        for entry in entries:
            self._drop(entry)

    def _evict(self) -> None:
        self.evictions += 1
        self._drop(next(iter(self._entries)))

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry]
        for message in entry.messages:
            del self.written[message]
        del entry.section.entries[entry.key]
        self._account.release(entry.size, Kind.CACHED)


class Section:
    """The answers of one loaded instance."""

    __slots__ = ("_cache", "_is_closed", "entries")

    def __init__(self, cache: ResponseCache) -> None:
        self.entries: dict[Key, Entry] = {}
        """Changed by the cache."""
        self._cache = cache
        self._is_closed = False

    def find(self, key: Key) -> Entry | None:
        """Return the answer to an equal request, or None."""
        entry = self.entries.get(key)
        if entry is not None:
            self._cache.touch(entry)
        return entry

    def drop(self, entry: Entry) -> None:
        """Drop an answer that was made with models which have changed."""
        self._cache.remove([entry])

    def keep(
        self, key: Key, outputs: Sequence[InferOutput], uses: frozenset[Use] = frozenset()
    ) -> None:
        """Keep a copy of an answer: its tensors' memory belongs to a batch or a request."""
        size = ENTRY_BYTES + _key_bytes(key) + sum(_size(output.data) for output in outputs)
        if self._is_closed or key in self.entries or not self._cache.admits(size):
            return
        copies = tuple([InferOutput(o.name, o.datatype, _copy(o.data)) for o in outputs])
        self._cache.add(Entry(self, key, copies, size, uses))

    def close(self) -> None:
        """Drop all answers, and keep none from now on: the instance leaves."""
        self._is_closed = True
        self._cache.remove(tuple(self.entries.values()))


def _key_bytes(key: Key) -> int:
    return sum(len(part) for part in key if isinstance(part, bytes))


def _size(tensor: Tensor) -> int:
    if not tensor.dtype.hasobject:
        return tensor.nbytes
    # Each element is an object with a head of its own.
    return sum(
        48 + (len(element) if isinstance(element, bytes | str) else 0)
        for element in tensor.ravel().tolist()
    )


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.copy()
    copy.flags.writeable = False
    return copy
