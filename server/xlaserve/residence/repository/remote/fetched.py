"""The files of one load, fetched from an object store and pinned in the cache."""

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from xlaserve.concurrency.workers import Workers
from xlaserve.errors import LoadCancelled
from xlaserve.files.roots import Roots
from xlaserve.residence.repository.exhaustion import load_failure, store_failure
from xlaserve.residence.repository.sources import VersionSource
from xlaserve.storage.cache import Lease
from xlaserve.storage.objects import FetchCancelled, StoreProblem


class FetchedFiles:
    """Keeps the fetched files of one load in the cache until they are released."""

    def __init__(self) -> None:
        self._lease: Lease | None = None

    async def fetch(self, workers: Workers, model: str, source: VersionSource) -> VersionSource:
        """Fetch the files of a version to disk; returns the version unchanged if it is local.

        Raises LoadFailed, OutOfSpace or InvalidModel. Cancelling the load cancels the fetch, and
        the files fetched so far are kept for the next attempt.
        """
        remote = source.remote
        if remote is None:
            return source
        control = remote.control()
        running = workers.fetch(partial(remote.take, control))
        try:
            self._lease = await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            control.cancel()
            running.add_done_callback(_close)
            raise
        except FetchCancelled:
            raise LoadCancelled(model) from None
        except StoreProblem as problem:
            reason = f"{remote.url} cannot be fetched: {problem}"
            raise store_failure(model, reason, problem) from problem
        except OSError as error:
            reason = f"its files cannot be kept: {error.strerror}"
            raise load_failure(model, reason, error) from error
        home = self._lease.path
        return replace(
            source,
            home=home,
            directory=home / source.directory.relative_to(source.home),
            roots=Roots.of((home,)),
        )

    def release(self) -> None:
        """Allow the cache to evict the files. Further calls do nothing."""
        if self._lease is not None:
            self._lease.close()


def _close(running: "Future[Lease]") -> None:
    if not running.cancelled() and running.exception() is None:
        running.result().close()
