"""Tracks abandoned calls whose threads are still running and hold resources."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from xlaserve.concurrency.limited import LimitedCall
from xlaserve.errors import LoadFailed, TooManyAbandoned

_SHOWN = "its thread cannot be stopped; it keeps its memory and may keep a core busy"


@dataclass(frozen=True, slots=True, eq=False)
class Abandoned:
    """An abandoned call that is still running in its thread."""

    model: str
    fingerprint: object
    """Identifies the files being loaded: a second load of the same files is refused."""
    doing: str
    """The stage of the load when it was abandoned: `warming 1 of 2`."""
    holds_bytes: int
    """Bytes of memory, on all devices, that stay reserved until the thread ends."""
    since: float = field(default_factory=time.monotonic)


class AbandonedWork:
    """All abandoned calls, with a limit on their number. Used on the event loop only."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: list[Abandoned] = []
        self._log = structlog.get_logger("loading")

    def __len__(self) -> int:
        return len(self._held)

    def add(self, call: LimitedCall[Any], work: Abandoned, then: Callable[[], None]) -> None:
        """Record an abandoned call; `then` is called when its thread ends."""
        self._held.append(work)
        self._log.error(
            "abandoned calls still running",
            model=work.model,
            doing=work.doing,
            holds_bytes=work.holds_bytes,
            abandoned=len(self._held),
            consequence=_SHOWN,
        )

        def ended() -> None:
            self._held.remove(work)
            seconds = round(time.monotonic() - work.since, 3)
            self._log.info("abandoned call finished", model=work.model, seconds=seconds)
            then()

        call.whenever(ended)

    def check(self, model: str, fingerprint: object) -> None:
        """Raise unless a load of this model may begin.

        Raises LoadFailed if an abandoned load of the same files is still running, and
        TooManyAbandoned if the limit is reached.
        """
        for work in self._held:
            if (work.model, work.fingerprint) == (model, fingerprint):
                seconds = time.monotonic() - work.since
                raise LoadFailed(
                    model,
                    f"an earlier load of the same files was abandoned {seconds:.0f} seconds ago "
                    f"and is still {work.doing}; {_SHOWN}. Change the files, or restart the server",
                )
        self.check_limit(model)

    def check_limit(self, model: str) -> None:
        """Raise TooManyAbandoned if the limit of abandoned calls is reached."""
        if len(self._held) >= self._limit:
            raise TooManyAbandoned(model, len(self._held))
