"""Coordinates changes of the server in the parent, so that all workers make them.

The requesting worker goes first, since it has the client's call: if the client lacks permission, or
a model cannot be loaded, the change fails there without affecting others. The first load of a model
can be undone, so it runs in all workers concurrently if its client may see every model.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import structlog

from xlaserve.concurrency.control_plane import (
    OF_LOADS,
    OF_MODELS,
    Change,
    ChangeKind,
    ChangesInProgress,
    ChangeText,
    Journal,
)
from xlaserve.concurrency.replay import Replay
from xlaserve.concurrency.sharing import Turns
from xlaserve.errors import EngineGone, EngineLost, LoadCancelled, ShuttingDown, XlaserveError
from xlaserve.residence.handover import spool
from xlaserve.workers.failures import error_of
from xlaserve.workers.messages import (
    LOADED,
    Answers,
    Ask,
    AskAll,
    Did,
    Do,
    Done,
    Failure,
    GiveUp,
    Go,
    Hold,
    Question,
    Release,
    Settled,
    WorkerAnswer,
)
from xlaserve.workers.worker_process import WorkerGone, WorkerProcess

QUESTION_SECONDS = 5.0
"""Time limit for a worker's answer to a question, in seconds."""

_UNDONE = {
    ChangeKind.LOAD: ChangeKind.UNLOAD,
    ChangeKind.FOLLOW: ChangeKind.UNLOAD,
    ChangeKind.LOAD_AT: ChangeKind.EVICT,
    ChangeKind.LOAD_URL: ChangeKind.EVICT,
    ChangeKind.REGISTER: ChangeKind.UNREGISTER,
}
"""The change that undoes another."""
_MODELS = OF_MODELS - {ChangeKind.PURGE}
_DIED = Failure("Exception", "a worker died")
_SHUTTING_DOWN = Failure(ShuttingDown.__name__, str(ShuttingDown()))

_log = structlog.get_logger("processes")


class _Pending:
    """A change requested by a worker, until its result has been sent."""

    def __init__(self, change: ChangeText) -> None:
        self.change = change
        self.is_given_up = False
        """Whether the client has left, or the server is shutting down."""
        self.has_no_way_back = False
        """Whether the change replaced a loaded model, so that it cannot be undone."""
        self.made_by: dict[int, WorkerProcess] = {}
        """The workers currently making the change, by the number of their Do message."""

    def give_up(self) -> None:
        """Cancel a load where it is being made, unless it cannot be undone. Ignores other kinds."""
        if self.change.kind not in OF_LOADS or self.has_no_way_back:
            return
        self.is_given_up = True
        for number, worker in self.made_by.items():
            worker.tell(GiveUp(number))


class Control:
    """Makes every worker apply changes, and records them for workers started later."""

    def __init__(
        self, workers: Callable[[], Sequence[WorkerProcess]], scratch_directory: Path
    ) -> None:
        self._workers = workers
        self._scratch = scratch_directory
        self._turns = Turns()
        self._numbers = itertools.count()
        self._purges = 0
        self._pending: dict[tuple[WorkerProcess, int], _Pending] = {}
        """Changes in progress, by requesting worker and that worker's number for the change."""
        self._is_stopping = False
        self._journal = Journal()
        self._in_progress = ChangesInProgress()

    # --- Changes ---

    def change(self, origin: WorkerProcess, ask: Ask) -> Coroutine[Any, Any, None]:
        """Return a coroutine that makes a requested change and reports the result to the worker.

        The change is registered now, so that a GiveUp can find it before the coroutine starts.
        """
        pending = self._pending[origin, ask.number] = _Pending(ask.change)
        kind = ask.change.kind

        async def made() -> None:
            failure: Failure | None = Failure("Exception", "the change failed in the parent")
            try:
                if self._in_progress.refuses(kind):
                    _remove(ask.change)
                    failure = _SHUTTING_DOWN
                    return
                with self._in_progress.making(kind):
                    if kind is ChangeKind.PURGE:
                        failure = await self._purge(origin, ask)
                    else:
                        failure = await self._in_turn(origin, ask, pending)
            except WorkerGone:
                return
            except Exception:
                _log.exception("change to workers failed", kind=kind, subject=ask.change.subject)
            finally:
                del self._pending[origin, ask.number]
                # Report after an exception too, since the worker waits for it.
                origin.tell(Settled(ask.number, failure))

        return made()

    def give_up(self, origin: WorkerProcess, number: int) -> None:
        """Cancel a load that a worker requested, in all workers that are making it."""
        pending = self._pending.get((origin, number))
        if pending is not None:
            pending.give_up()

    def stop(self) -> None:
        """Reject all changes from now on, and cancel loads in progress."""
        self._is_stopping = True
        for pending in list(self._pending.values()):
            pending.give_up()

    async def _in_turn(self, origin: WorkerProcess, ask: Ask, pending: _Pending) -> Failure | None:
        change, purges = ask.change, self._purges
        async with (
            self._turns.of((change.kind in _MODELS, change.subject)),
            self._held(change) as is_loaded,
        ):
            if purges != self._purges or pending.is_given_up or self._is_stopping:
                return _refused(change, is_stopping=self._is_stopping)
            if not origin.makes(change.kind):
                return await self._by_engine(pending)
            if change.kind in OF_LOADS and not is_loaded and not ask.is_limited:
                return await self._side_by_side(origin, ask, pending, purges)
            done = await origin.expect(Go(ask.number), ("done", ask.number))
            if done.failure is not None:
                return _refused(change, is_stopping=self._is_stopping)
            pending.has_no_way_back = done.was_loaded
            dids = await self._by_others(origin, pending)
            made = [origin, *(one for one in dids if one not in _failures(dids))]
            return await self._settled(
                pending, made, _failures(dids), purges, was_loaded=done.was_loaded
            )

    async def _side_by_side(
        self, origin: WorkerProcess, ask: Ask, pending: _Pending, purges: int
    ) -> Failure | None:
        """Make a change in all workers concurrently; return the failure, or None."""

        async def here() -> Done | None:
            try:
                done: Done = await origin.expect(Go(ask.number), ("done", ask.number))
            except WorkerGone:
                # If a worker dies, its replacement replays the changes of the others.
                return None
            if done.failure is not None:
                pending.give_up()
            return done

        done, dids = await asyncio.gather(here(), self._by_others(origin, pending))
        made = [one for one, did in dids.items() if did is not None and did.failure is None]
        failed = _failures(dids)
        if done is not None and done.failure is not None:
            failed = {origin: done.failure, **failed}
        elif done is not None:
            made.append(origin)
        if not made:
            return next(iter(failed.values()), None) or _refused(
                ask.change, is_stopping=self._is_stopping
            )
        was_loaded = done is not None and done.was_loaded
        return await self._settled(pending, made, failed, purges, was_loaded=was_loaded)

    async def _settled(
        self,
        pending: _Pending,
        made: Sequence[WorkerProcess],
        failed: Mapping[WorkerProcess, Failure],
        purges: int,
        *,
        was_loaded: bool,
    ) -> Failure | None:
        """Record a change that all workers made, or else undo it; return the failure, or None."""
        change = pending.change
        if not failed and purges == self._purges and not pending.is_given_up:
            self._remember(change)
            return None
        for worker, failure in {} if pending.is_given_up else failed.items():
            _log.error(
                "change failed in one worker only",
                worker=worker.role.worker,
                kind=change.kind,
                subject=change.subject,
                error=failure.text,
            )
        await self._undo(change, made, failed, was_loaded=was_loaded)
        return next(iter(failed.values()), None) or _refused(change, is_stopping=self._is_stopping)

    async def _by_engine(self, pending: _Pending) -> Failure | None:
        """Make a front end's change in the engine; returns after all front ends show the result."""
        change = pending.change
        engine = next((one for one in self._workers() if one.makes(change.kind)), None)
        did = None if engine is None else await self._do(engine, change, pending)
        if did is None:
            _remove(change)
            # If the engine died during the change, clients must not retry it on every replica.
            gone = (EngineGone if engine is None else EngineLost)(change.subject)
            return Failure(type(gone).__name__, str(gone))
        failure = did.failure
        if failure is None:
            self._remember(change)
        else:
            _remove(change)
            # The engine stops after the front ends, so it does not know why it cancels a load.
            if self._is_stopping and failure.error == LoadCancelled.__name__:
                failure = _SHUTTING_DOWN
        return failure

    async def _by_others(
        self, origin: WorkerProcess, pending: _Pending
    ) -> dict[WorkerProcess, Did | None]:
        """Make a change in all other workers, and return the results; None for a worker that died.

        Includes workers that become able to make changes in the meantime: the journal replayed to
        them does not contain this change yet.
        """
        change = pending.change
        found: dict[WorkerProcess, Did | None] = {}
        while not pending.is_given_up and (
            new := [
                one
                for one in self._workers()
                if one not in (origin, *found) and one.makes(change.kind)
            ]
        ):
            results = await asyncio.gather(*(self._do(worker, change, pending) for worker in new))
            found.update(zip(new, results, strict=True))
        return found

    @asynccontextmanager
    async def _held(self, change: ChangeText) -> AsyncIterator[bool]:
        """Within the block, no worker reports a model as ready that another one lacks.

        Every worker acknowledges the start before the block begins, and the end before this
        returns. Yields whether any worker has loaded the model already.
        """
        if change.kind not in _MODELS:
            yield False
            return
        number, workers = next(self._numbers), self._workers()
        unloads = change.kind in (ChangeKind.UNLOAD, ChangeKind.EVICT)
        models = list(change.arguments.get("models") or [change.subject])
        try:
            yield await self._noted(workers, Hold(number, models, not unloads), number)
        finally:
            await self._noted(workers, Release(number), number)

    async def _noted(
        self, workers: Sequence[WorkerProcess], message: Hold | Release, number: int
    ) -> bool:
        noted = (worker.expect(message, ("noted", number)) for worker in workers)
        is_loaded = False
        for result in await asyncio.gather(*noted, return_exceptions=True):
            if not isinstance(result, BaseException):
                is_loaded |= result.is_loaded
            elif not isinstance(result, WorkerGone):
                raise result
        return is_loaded

    async def _purge(self, origin: WorkerProcess, ask: Ask) -> Failure | None:
        """Unload all models in every worker; loads in progress are cancelled."""
        self._purges += 1
        done = await origin.expect(Go(ask.number), ("done", ask.number))
        others = [worker for worker in self._workers() if worker is not origin]
        dids = await asyncio.gather(*(self._do(worker, ask.change) for worker in others))
        for change in self._journal.forget_models():
            _remove(change)
        self._purges += 1
        return next((did.failure for did in (done, *dids) if did and did.failure), None)

    async def _undo(
        self,
        change: ChangeText,
        made: Sequence[WorkerProcess],
        failed: Collection[WorkerProcess],
        *,
        was_loaded: bool,
    ) -> None:
        kind = _UNDONE.get(change.kind)
        if was_loaded or kind is None:
            # The state before the change is gone in the workers that made it, so it cannot be
            # undone. Restart the workers that failed, so that they replay it.
            self._remember(change)
            # During shutdown, workers reject every change but still have clients to answer.
            for worker in () if self._is_stopping else failed:
                worker.failure = f"it failed to {change.kind} '{change.subject}', unlike others"
                worker.kill()
            return
        arguments = {"models": [change.subject]} if kind is ChangeKind.UNLOAD else {}
        back = ChangeText(kind, change.subject, arguments)
        await asyncio.gather(*(self._do(worker, back) for worker in made))
        _remove(change)

    async def _do(
        self, worker: WorkerProcess, change: ChangeText, pending: _Pending | None = None
    ) -> Did | None:
        """Make a change in one worker; None if it dies, since its replacement replays changes.

        `pending` tracks the change, so that it is cancelled if its client leaves.
        """
        number = next(self._numbers)
        did: Did | None = None
        made_by = {} if pending is None else pending.made_by
        made_by[number] = worker
        try:
            did = await worker.expect(Do(number, change), ("did", number))
        except WorkerGone:
            pass
        finally:
            del made_by[number]
        return did

    # --- Workers started later ---

    def _remember(self, change: ChangeText) -> None:
        for before in self._journal.remember(change):
            if before.files != change.files:
                _remove(before)

    async def replay(self, worker: WorkerProcess) -> None:
        """Make all recorded changes in a new worker.

        A failed load of an ensemble is repeated after its steps, if the journal loads them later.
        """

        async def make(known: ChangeText) -> Failure | None:
            async with self._turns.of((known.kind in _MODELS, known.subject)):
                change = self._journal.last(known)
                did = None if change is None else await self._do(worker, change)
            return None if did is None else did.failure

        # The changes' files are on disk, so there are no contents to drop from memory.
        replay = Replay(make, attrgetter("text"), lambda change: change)
        for known in self._journal.changes():
            if worker.makes(known.kind):
                await replay.make(known)
        await replay.settle()
        for one in replay.failed:
            fields = {"worker": worker.role.worker, "subject": one.change.subject}
            _log.error("worker lacks changes of other workers", **fields, error=one.error.text)

    async def converge(self, worker: WorkerProcess) -> None:
        """Make all other workers load what a restarted worker found in the repository.

        Its files may be newer than those of the others, if its predecessor died during a reload or
        nobody has requested a reload yet. Workers that have the same files load nothing.
        """
        if not worker.makes(ChangeKind.FOLLOW):
            return
        number = next(self._numbers)
        try:
            async with asyncio.timeout(QUESTION_SECONDS):
                reply = await worker.expect(Question(number, LOADED), ("reply", number))
        except (TimeoutError, WorkerGone) as error:
            _log.error(
                "loaded models of a worker unknown", worker=worker.role.worker, reason=str(error)
            )
            return
        for name in reply.said or ():
            change = ChangeText(ChangeKind.FOLLOW, name, {})
            async with self._turns.of((True, name)), self._held(change):
                last = self._journal.last(change)
                if last is not None and (last.arguments or last.files):
                    continue  # loaded from a client's files or configuration: all have the same
                dids = await self._by_others(worker, _Pending(change))
            for other, failure in _failures(dids).items():
                about = {"worker": other.role.worker, "subject": name, "error": failure.text}
                _log.error("model files differ between a worker and a restarted one", **about)

    # --- Questions ---

    async def ask_all(self, origin: WorkerProcess, ask: AskAll) -> None:
        """Ask all other workers a question, and send their answers to a worker.

        Workers that are not ready yet are not asked, since they have served nothing.
        """
        others = [one for one in self._workers() if one is not origin and one.is_ready]
        answers = await asyncio.gather(*(self._answer(worker, ask) for worker in others))
        origin.tell(Answers(ask.number, answers))

    async def _answer(self, worker: WorkerProcess, ask: AskAll) -> WorkerAnswer:
        name, number = worker.role.worker, next(self._numbers)
        if worker.is_silent:
            return WorkerAnswer(name, None, "it does not respond")
        try:
            async with asyncio.timeout(QUESTION_SECONDS):
                reply = await worker.expect(Question(number, ask.name, ask.said), ("reply", number))
        except TimeoutError:
            return WorkerAnswer(name, None, f"no answer within {QUESTION_SECONDS:.0f} s")
        except WorkerGone as error:
            return WorkerAnswer(name, None, str(error))
        return WorkerAnswer(name, reply.said, reply.problem)

    # --- Replacement of a running server ---

    async def hold(self, kinds: Collection[ChangeKind]) -> Sequence[ChangeText]:
        """Reject further changes, wait for those in progress, and return the recorded ones."""
        await self._in_progress.hold(kinds)
        return self._journal.changes(kinds)

    def go_on(self) -> None:
        """Accept changes again."""
        self._in_progress.go_on()

    def files_of(self, change: ChangeText) -> Mapping[str, bytes]:
        """Return the files of a change; blocks on disk I/O."""
        if not change.files:
            return {}
        return msgspec.msgpack.decode(Path(change.files).read_bytes(), type=dict[str, bytes])

    async def replies(self, question: str) -> Sequence[Any]:
        """Return the answers of all workers that have one.

        Workers that are not ready yet are not asked, since they cannot speak for the server.
        """
        ask = AskAll(0, question)
        ready = [worker for worker in self._workers() if worker.is_ready]
        answers = await asyncio.gather(*(self._answer(worker, ask) for worker in ready))
        return [answer.said for answer in answers if answer.said is not None]

    async def replay_change(self, change: Change) -> None:
        """Make a change of the replaced server in all workers, and record it.

        Raises an XlaserveError if a worker could not make it.
        """
        text = ChangeText(change.kind, change.subject, dict(change.arguments))
        if change.files:
            data = msgspec.msgpack.encode(change.files)
            path = await asyncio.to_thread(spool, self._scratch, data)
            text = msgspec.structs.replace(text, files=path)
        workers = [worker for worker in self._workers() if worker.makes(change.kind)]
        for did in await asyncio.gather(*(self._do(worker, text) for worker in workers)):
            failure = _DIED if did is None else did.failure
            if failure is not None:
                _remove(text)
                error = error_of(failure)
                raise error if isinstance(error, XlaserveError) else XlaserveError(failure.text)
        self._remember(text)

    def close(self) -> None:
        """Remove the files of all recorded changes."""
        for change in self._journal.changes():
            _remove(change)


def _refused(change: ChangeText, *, is_stopping: bool) -> Failure:
    _remove(change)
    if is_stopping:
        return _SHUTTING_DOWN
    return Failure(LoadCancelled.__name__, f"the load of '{change.subject}' was cancelled")


def _failures(dids: Mapping[WorkerProcess, Did | None]) -> dict[WorkerProcess, Failure]:
    return {one: did.failure for one, did in dids.items() if did and did.failure is not None}


def _remove(change: ChangeText) -> None:
    if change.files:
        with suppress(OSError):
            Path(change.files).unlink()
