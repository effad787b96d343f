"""Gives a worker access to the event log, which the parent keeps."""

import asyncio
import itertools
from contextlib import suppress

from xlaserve.errors import WorkersSilent
from xlaserve.serving.observability.events import Event, Kept
from xlaserve.workers.channel import Channel, ChannelError
from xlaserve.workers.messages import AskEvents, EventsAre, Happened, ToWorker

_SECONDS = 5.0
"""Time limit for the parent's answer."""


class ParentEvents:
    """Sends the events of this process to the parent, and reads the events of all processes."""

    def __init__(self, channel: "Channel[ToWorker]", worker: int) -> None:
        self._worker = worker
        self._channel = channel
        self._numbers = itertools.count()
        self._reads: dict[int, asyncio.Future[Kept]] = {}

    def note(self, event: Event) -> None:
        """Send an event; drop it if the parent has exited, since this process will exit too."""
        with suppress(ChannelError):
            self._channel.send(Happened(event))

    async def read(self) -> Kept:
        """Return the events of the server; raises WorkersSilent if the parent does not answer."""
        number = next(self._numbers)
        answer = self._reads[number] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(AskEvents(number))
            async with asyncio.timeout(_SECONDS):
                kept: Kept = await answer
        except (ChannelError, TimeoutError) as error:
            reason = f"its parent gave no events within {_SECONDS:.0f} s"
            raise WorkersSilent({str(self._worker): reason}) from error
        finally:
            del self._reads[number]
        return kept

    def heard(self, message: EventsAre) -> None:
        """Complete the `read` that waits for this answer, if it has not timed out."""
        answer = self._reads.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(message.kept)
