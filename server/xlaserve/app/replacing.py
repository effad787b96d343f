"""Takes over the changes that clients made in a server that this one replaces."""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from xlaserve.concurrency.control_plane import Change
from xlaserve.errors import XlaserveError
from xlaserve.process.systemd import Systemd
from xlaserve.residence import handover
from xlaserve.residence.handover import ChangesNotTaken
from xlaserve.settings import Settings

_log = structlog.get_logger("replacing")


async def take_changes(
    systemd: Systemd, settings: Settings, make_again: Callable[[Change], Awaitable[None]]
) -> None:
    """Make again what clients have changed in the server that this one replaces, in its order.

    Its own start is done by then. Raises ChangesNotTaken where it cannot be read, or a model
    cannot be loaded as it is there: this server takes nothing over then.
    """
    try:
        file = None if systemd.predecessor is None else await systemd.predecessor.changes()
    except OSError as error:
        raise ChangesNotTaken(str(error)) from error
    if file is None:
        return
    count = 0
    with file:
        changes = handover.read(file, settings)
        while (change := await asyncio.to_thread(next, changes, None)) is not None:
            count += 1
            try:
                await make_again(change)
            except XlaserveError as error:
                if handover.blocks_start(change):
                    raise ChangesNotTaken(f"{change.kind} '{change.subject}': {error}") from error
                _log.warning(
                    "change of a client not taken over",
                    kind=change.kind,
                    subject=change.subject,
                    reason=str(error),
                    to_do="the client has to make it again",
                )
    _log.info("changes of clients taken over", changes=count)
