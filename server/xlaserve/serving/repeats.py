"""Answers byte-identical requests from the response cache without parsing them.

A fast path before the caching station, which decides what is kept and for how long. It stores
serialized answers and no verdicts: each call passes the gates, is counted by the version that
answers it now, and is answered only by the instance that computed the stored answer.
"""

import time
from collections.abc import Callable
from typing import Protocol

from xlaserve.errors import XlaserveError
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import Executed, InferCall, Relayed, ServedInstance, ServedVersion
from xlaserve.serving.response_cache import MOST_MESSAGE_BYTES, ResponseCache
from xlaserve.serving.uses import are_current


class Residents(Protocol):
    """The registry of loaded models."""

    def resolve(self, name: str, number: str = "") -> tuple[ServedVersion, ServedInstance]:
        """Return the version that answers; raises ModelNotFound or ModelNotReady."""
        ...


class Repeats:
    """The fast path for byte-identical requests; belongs to the event loop."""

    def __init__(
        self,
        residents: Residents,
        gates: Gates,
        cache: ResponseCache,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._residents = residents
        self._gates = gates
        self._cache = cache
        self._clock = clock

    @classmethod
    def of(
        cls, residents: Residents, gates: Gates, cache: ResponseCache | None
    ) -> "Repeats | None":
        """Return the fast path for a cache, or None if there is no cache."""
        return None if cache is None else cls(residents, gates, cache)

    def answer(self, call: InferCall, message: object) -> bytes | None:
        """Close an admitted call, and return its stored answer as it was serialized before.

        Returns None, with nothing changed, if the request must be parsed. Raises like the model's
        gates.
        """
        if not self._cache.written or type(message) is not bytes:
            return None
        written = self._cache.find_written(call.owner, message)
        # Observers that saw the call begin need details that only parsing provides.
        if written is None or self._gates.are_watched:
            return None
        if call.sight is not None and not call.sight.shows(written.model):
            return None
        begun = self._clock()
        try:
            version, instance = self._residents.resolve(written.model, written.version)
        except XlaserveError:
            return None
        uses = written.entry.uses
        is_current = not uses or are_current(uses, self._residents.resolve)
        if instance is not written.instance or not is_current:
            return None
        call.started_ns = begun
        call.model = written.model
        call.rows = written.rows
        call.found = version
        call.instance = instance
        call.admission = version.admission
        call.is_found = True
        for check in self._gates.of_model:
            check(call)
        self._cache.touch(written.entry)
        ended = self._clock()
        call.executed = Executed({}, ended, ended)
        call.close(Relayed(hit_ns=ended - begun))
        return written.answer

    def learn(self, call: InferCall, message: object, version: str, answer: bytes) -> None:
        """Store the serialized answer of a call whose answer came from the cache.

        `version` is the requested one. Requests with an id are skipped: they are seldom repeated
        exactly.
        """
        if type(message) is bytes and len(message) <= MOST_MESSAGE_BYTES and not call.id:
            self._cache.keep_written(call, message, version, answer)
