"""The response cache, which stores reusable answers up to a byte limit.

A key contains everything that an answer depends on: the exact inputs and their shapes, the
requested outputs, and the parameters of the request. It also contains the caller: otherwise a
quick answer would reveal that somebody else has sent the same request. Short inputs are stored
verbatim, longer ones as SHA-256, so that nobody can construct two requests with equal keys.
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
"""Inputs up to this size are kept verbatim in a key: comparing them is as quick as comparing a
hash.
"""

ENTRY_BYTES = 1024
"""Memory charged per entry, in addition to its tensors and its key."""

MOST_MESSAGE_BYTES = 4096
"""Maximum length of request messages whose serialized answers are kept: for longer ones, computing
the key takes most of the time anyway."""
_MOST_MESSAGES = 4
"""Maximum number of serialized answers per entry, one for each distinct request message."""
_WRITTEN_BYTES = 512
"""Memory charged per serialized answer, in addition to the message and the answer."""

_NO_EFFECT = frozenset({"priority", "timeout", "binary_data_output"})
"""Parameters that affect when and how a request is answered, not the outputs."""

Key: TypeAlias = tuple[Hashable, ...]


def input_bytes(call: InferCall) -> int:
    """Return the number of input bytes that `key_of` reads."""
    return sum([_size(t) if t.dtype.hasobject else t.nbytes for t in call.inputs.values()])


def key_of(call: InferCall, names: Sequence[str]) -> Key:
    """Return the cache key of a call; `names` are the inputs of its model.

    Raises TensorDataError for invalid BYTES elements.
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
    """Return parameters as text, since 1, 1.0 and True compare equal, as do 0.0 and -0.0."""
    return tuple(sorted((k, repr(v)) for k, v in parameters.items() if k not in _NO_EFFECT))


def _bits(data: Tensor | bytes | memoryview) -> Hashable:
    """Return short data verbatim, longer data as its size and hash."""
    size = len(data) if isinstance(data, bytes) else data.nbytes
    if size <= MOST_EXACT_BYTES:
        return data if isinstance(data, bytes) else data.tobytes()
    if not isinstance(data, np.ndarray):
        return size, hashlib.sha256(data).digest()
    # Viewed as bytes: hashlib cannot read all datatypes, such as bfloat16.
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
        """Bytes charged for the entry."""
        self.uses = uses
        """Other models used for the answer."""
        self.messages: list[tuple[str, bytes]] = []
        """Owners and messages of the entry's serialized answers; maintained by the cache."""


class Written(msgspec.Struct, frozen=True):
    """A serialized answer, for byte-identical requests."""

    entry: Entry
    instance: ServedInstance
    """The instance that computed it."""
    model: str
    version: str
    """Requested version; empty for the newest."""
    rows: int
    answer: bytes


class ResponseCache:
    """The answers of all models, up to a limit; belongs to the event loop.

    Evicts the least recently used entry. Its bytes are charged to the memory ledger; under memory
    pressure everything is evicted, because requests take priority.
    """

    def __init__(self, limit: int, ledger: Ledger) -> None:
        self.limit = limit
        self.evictions = 0
        """Answers evicted to make room or under memory pressure."""
        self._ledger = ledger
        self._account = ledger.open()
        self._entries: OrderedDict[Entry, None] = OrderedDict()
        """In order of use; the most recently used entry is last."""
        self.written: dict[tuple[str, bytes], Written] = {}
        """Serialized answers by owner and request message; removed with their entries."""
        ledger.on_pressure(self.clear)

    @classmethod
    def of(cls, most_bytes: int, ledger: Ledger) -> Self | None:
        """Return a cache with a size limit, or None if the limit is 0."""
        return cls(most_bytes, ledger) if most_bytes else None

    @property
    def held(self) -> int:
        """Return the bytes charged to the ledger."""
        return self._account.held

    def __len__(self) -> int:
        return len(self._entries)

    def section(self) -> "Section":
        """Return a new section, for one loaded instance."""
        return Section(self)

    def clear(self) -> None:
        """Evict all entries."""
        self.evictions += len(self._entries)
        while self._entries:
            self._drop(next(iter(self._entries)))

    # --- serialized answers ---

    def find_written(self, owner: str, message: bytes) -> Written | None:
        """Return the serialized answer for this caller and message, or None."""
        return self.written.get((owner, message))

    def keep_written(self, call: InferCall, message: bytes, version: str, answer: bytes) -> None:
        """Store the serialized answer of a call, for as long as its entry is kept."""
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
        while self.held + size > self.limit:  # never evicts this entry
            self._evict()
        entry.size += size
        entry.messages.append(key)
        self._account.hold(size, Kind.CACHED)
        self.written[key] = Written(entry, call.instance, call.model, version, call.rows, answer)

    # --- called by sections ---

    def touch(self, entry: Entry) -> None:
        """Mark an entry as the most recently used."""
        self._entries.move_to_end(entry)

    def admits(self, size: int) -> bool:
        """Tell whether an answer of this size may be stored; never under memory pressure."""
        return size <= self.limit and not self._ledger.is_pressed

    def add(self, entry: Entry) -> None:
        """Store an entry, evicting others if necessary."""
        while self._entries and self.held + entry.size > self.limit:
            self._evict()
        self._entries[entry] = None
        entry.section.entries[entry.key] = entry
        self._account.hold(entry.size, Kind.CACHED)

    def remove(self, entries: Sequence[Entry]) -> None:
        """Remove invalid entries."""
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
    """The cached answers of one loaded instance."""

    __slots__ = ("_cache", "_is_closed", "entries")

    def __init__(self, cache: ResponseCache) -> None:
        self.entries: dict[Key, Entry] = {}
        """Maintained by the cache."""
        self._cache = cache
        self._is_closed = False

    def find(self, key: Key) -> Entry | None:
        """Return the entry for a key, or None, and mark it as used."""
        entry = self.entries.get(key)
        if entry is not None:
            self._cache.touch(entry)
        return entry

    def drop(self, entry: Entry) -> None:
        """Remove an answer because a model that it was computed with has changed."""
        self._cache.remove([entry])

    def keep(
        self, key: Key, outputs: Sequence[InferOutput], uses: frozenset[Use] = frozenset()
    ) -> None:
        """Store a copy of an answer, whose tensors may be views of a batch or a request."""
        size = ENTRY_BYTES + _key_bytes(key) + sum(_size(output.data) for output in outputs)
        if self._is_closed or key in self.entries or not self._cache.admits(size):
            return
        copies = tuple([InferOutput(o.name, o.datatype, _copy(o.data)) for o in outputs])
        self._cache.add(Entry(self, key, copies, size, uses))

    def close(self) -> None:
        """Remove all entries and accept no more, because the instance is unloaded or replaced."""
        self._is_closed = True
        self._cache.remove(tuple(self.entries.values()))


def _key_bytes(key: Key) -> int:
    return sum(len(part) for part in key if isinstance(part, bytes))


def _size(tensor: Tensor) -> int:
    if not tensor.dtype.hasobject:
        return tensor.nbytes
    # Every element is a Python object with its own header.
    return sum(
        48 + (len(element) if isinstance(element, bytes | str) else 0)
        for element in tensor.ravel().tolist()
    )


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.copy()
    copy.flags.writeable = False
    return copy
