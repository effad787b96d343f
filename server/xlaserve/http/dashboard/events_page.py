"""The event log as JSON, for the status page and other clients."""

import re
from collections.abc import Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Annotated

import msgspec

from xlaserve.errors import InvalidParameter
from xlaserve.http.dashboard.permits import Permits, models_in_events, permit_everything
from xlaserve.http.messages import HttpRequest, HttpResponse
from xlaserve.http.routing import Body, QueryParameter, Route
from xlaserve.serving.access.sight import Sees, everything, without_names
from xlaserve.serving.call import Operation
from xlaserve.serving.observability.events import MAX_NAME, Event, Events, chosen, cut

MAX_EVENTS = 1000
"""Maximum number of events per response; the newest matching ones are returned."""

_FRESH = MappingProxyType({"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_FLAGS = MappingProxyType({"": False, "false": False, "true": True})
_SHOWN = 80


class EventsOfPage(msgspec.Struct):
    """The matching events, newest first."""

    log: Annotated[
        str, msgspec.Meta(description="Identifier of the event log; a restart changes it.")
    ]
    last: Annotated[
        int, msgspec.Meta(description="Number of the newest event that the caller may see.")
    ]
    first: Annotated[int, msgspec.Meta(description="Number of the oldest event in the log.")]
    dropped: Annotated[
        int,
        msgspec.Meta(description="Number of older events that were dropped; 0 if `limited`."),
    ]
    limited: Annotated[
        bool, msgspec.Meta(description="Whether the caller may see only some of the events.")
    ]
    matching: Annotated[
        int, msgspec.Meta(description="Number of matching events; `events` may contain fewer.")
    ]
    events: list[Event]


class EventRoutes:
    """The handler of the event log."""

    def __init__(self, events: Events, permits: Permits = permit_everything) -> None:
        self._events = events
        self._permits = permits

    def table(self) -> list[Route]:
        """Return the route of the event log."""
        return [
            Route(
                "GET",
                "/page/events",
                Operation.PAGE,
                self.show,
                "Loads, unloads, evictions and failures, and who asked for them",
                "people",
                Body(EventsOfPage),
                query=(
                    QueryParameter("search", str, "Only events that contain this text."),
                    QueryParameter("failed", bool, "Only failures."),
                    QueryParameter("model", str, "Only events of this model."),
                    QueryParameter("after", int, "Only events with a larger number."),
                ),
                errors=(400, 503),
            )
        ]

    async def show(self, request: HttpRequest) -> HttpResponse:
        """Return the events that the caller may see; raises InvalidParameter, WorkersSilent."""
        query = request.query
        after = _number(query.get("after", ""))
        failed = _flag(query.get("failed", ""))
        kept = await self._events.read()
        sees = models_in_events(self._permits, request.call)
        is_limited = sees is not everything
        seen = visible(kept.events, sees, cut(request.call.owner, MAX_NAME))
        # The actual counts would reveal how many events are hidden from the caller.
        dropped = 0 if is_limited else kept.dropped
        found = chosen(
            [event for event in seen if event.number > after],
            search=query.get("search", ""),
            failed=failed,
            model=query.get("model", ""),
        )
        answer = EventsOfPage(
            str(kept.began_ns),
            seen[-1].number if seen else dropped,
            seen[0].number if is_limited and seen else dropped + 1,
            dropped,
            is_limited,
            len(found),
            found[: -MAX_EVENTS - 1 : -1],
        )
        return HttpResponse(parts=[msgspec.json.encode(answer)], headers=_FRESH)


def visible(events: Sequence[Event], sees: Sees, owner: str = "") -> Sequence[Event]:
    """Return the events that a caller may see; server events require access to all models.

    Hidden models and other callers are not named in the remaining events. Event numbers are
    replaced by times in microseconds: consecutive numbers would reveal how many events are hidden.
    """
    if sees is everything:
        return events
    found = [event for event in events if event.model and sees(event.model)]
    # Strictly increasing, even if the clock is not.
    times = accumulate((event.at_ns // 1000 for event in found), lambda last, at: max(at, last + 1))
    return [
        msgspec.structs.replace(
            event,
            number=number,
            text=without_names(event.text, sees),
            for_model=event.for_model if sees(event.for_model) else "",
            asker=event.asker.seen_by(owner),
        )
        for event, number in zip(found, times, strict=True)
    ]


def _number(text: str) -> int:
    if not text:
        return 0
    if not _NUMBER.fullmatch(text):
        raise InvalidParameter("after", "the number of an event", repr(text[:_SHOWN]))
    return int(text)


def _flag(text: str) -> bool:
    if text not in _FLAGS:
        raise InvalidParameter("failed", "true or false", repr(text[:_SHOWN]))
    return _FLAGS[text]
