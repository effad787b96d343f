"""Applies the changes that clients made in the server that this one replaces."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import structlog

from xlaserve.concurrency.control_plane import ANSWERING, OF_MODELS, Change, ChangeKind
from xlaserve.concurrency.replay import Replay
from xlaserve.errors import XlaserveError
from xlaserve.process.systemd import Systemd
from xlaserve.residence import handover
from xlaserve.residence.handover import ChangesNotTaken
from xlaserve.residence.lost import GONE, check_lost
from xlaserve.settings import Settings
from xlaserve.storage.urls import url_of

_log = structlog.get_logger("replacing")


class Here(Protocol):
    """The processes of the new server."""

    async def replay_change(self, change: Change) -> None:
        """Apply a change from the replaced server; raise as the original change would."""

    async def replies(self, question: str) -> Sequence[Any]:
        """Return each process's reply to a question."""
        ...


async def take_changes(systemd: Systemd, settings: Settings, here: Here) -> None:
    """Apply the changes that clients made in the server that this one replaces.

    Called after startup. The changes are applied in their original order, except that an ensemble
    whose steps were loaded after it is applied again at the end. Models that no longer exist are
    logged. Raises ChangesNotTaken if the changes cannot be read, or if a model that works in the
    old server fails to load here although its files exist; the replacement is then abandoned.
    """
    if systemd.predecessor is None:
        return
    try:
        file = await systemd.predecessor.changes()
    except OSError as error:
        raise ChangesNotTaken(str(error)) from error
    theirs = None
    replay = Replay(partial(_error_of, here), str, _without_files)
    gone: dict[str, tuple[str, str]] = {}
    unloaded: set[str] = set()
    if file is not None:
        with file:
            theirs = await asyncio.to_thread(handover.versions, file)
            changes = handover.read(file, settings)
            count = 0
            while (change := await asyncio.to_thread(next, changes, None)) is not None:
                count += 1
                if change.kind is ChangeKind.UNLOAD:
                    unloaded.add(change.subject)
                await replay.make(change)
        await replay.settle()
        for one in replay.failed:
            if _is_gone(one.change, one.error):
                gone[one.change.subject] = (type(one.error).__name__, str(one.error))
        _log.info("client changes taken over", changes=count)
    answers = await here.replies(ANSWERING)
    strict = settings.exit_on_error
    check_lost(theirs, answers, gone=gone, unloaded=unloaded, strict=strict)


async def _error_of(here: Here, change: Change) -> XlaserveError | None:
    """Apply a change; return the error if it fails, or None."""
    try:
        await here.replay_change(change)
    except XlaserveError as error:
        return error
    return None


def _without_files(change: Change) -> Change:
    return replace(change, files={})


def _is_gone(change: Change, error: XlaserveError) -> bool:
    """Tell whether a change failed because its model does not exist; log other failures.

    Raises ChangesNotTaken if the failure must stop the replacement.
    """
    if change.kind in OF_MODELS:
        if type(error).__name__ in GONE:
            return True
        raise ChangesNotTaken(f"{change.kind} '{change.subject}': {error}") from error
    _log.warning(
        "client change not taken over",
        kind=change.kind,
        subject=change.subject,
        reason=str(error),
        to_do="the client must repeat it",
    )
    return False


def without_repositories_away(settings: Settings, systemd: Systemd) -> Settings:
    """Return a replacement server's settings without model repositories that cannot be read.

    If no repository can be read, the settings are unchanged, and startup fails as usual.
    """
    given = (settings.repository, *settings.model_repository)
    if systemd.predecessor is None or settings.bare_model:
        return settings
    away: dict[int, str] = {}
    for number, path in enumerate(given):
        if not url_of(path):
            try:
                os.scandir(path).close()
            except OSError as error:
                away[number] = error.strerror or str(error)
    if len(away) == len(given):
        return settings
    for number, reason in away.items():
        _log.error(
            "model repository not served",
            path=str(given[number]),
            reason=reason,
            to_do="once it is readable, send SIGUSR2 again to load its models",
        )
    first, *others = (path for number, path in enumerate(given) if number not in away)
    return replace(settings, repository=first, model_repository=tuple(others))
