"""The event log as a worker has it: the parent keeps it."""

import asyncio
import itertools
from contextlib import suppress

from xlaserve.errors import WorkersSilent
from xlaserve.serving.observability.events import Event, Kept
from xlaserve.workers.channel import Channel, ChannelError
from xlaserve.workers.messages import AskEvents, EventsAre, Happened, ToWorker

_SECONDS = 5.0
"""Seconds that the parent has to answer."""


class ParentEvents:
    """Tells the parent what happened in this process, and asks it for the events of all."""

    def __init__(self, channel: "Channel[ToWorker]", worker: int) -> None:
        self._worker = worker
        self._channel = channel
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Kept]] = {}

    def note(self, event: Event) -> None:
        """Send an event to the parent; dropped without one, since the process is about to end."""
        with suppress(ChannelError):
            self._channel.send(Happened(event))

    async def read(self) -> Kept:
        """Return the events of the server; raises WorkersSilent where the parent gives none."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(AskEvents(number))
            async with asyncio.timeout(_SECONDS):
                kept: Kept = await answer
        except (ChannelError, TimeoutError) as error:
            reason = f"its parent gave no events within {_SECONDS:.0f} s"
            raise WorkersSilent({str(self._worker): reason}) from error
        finally:
            del self._asked[number]
        return kept

    def heard(self, message: EventsAre) -> None:
        """Take an answer of the parent; an abandoned one is dropped."""
        answer = self._asked.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(message.kept)
