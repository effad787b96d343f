"""Changes of the server, in the parent: each is made by the worker that asks, then by all others.

The worker that asks goes first, since it has the client's call: what the client may not do, and
a model that cannot be loaded, fail there and change nothing elsewhere.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog

from xlaserve.core.control_plane import OF_MODELS, ChangeKind
from xlaserve.core.sharing import Turns
from xlaserve.errors import EngineGone
from xlaserve.processes.messages import (
    LOADED,
    Answers,
    Ask,
    AskAll,
    ChangeText,
    Did,
    Do,
    Failure,
    Go,
    Hold,
    Question,
    Release,
    Settled,
    WorkerAnswer,
)
from xlaserve.processes.worker_process import WorkerGone, WorkerProcess

QUESTION_SECONDS = 5.0
"""Seconds that a worker has to answer a question that is asked of all."""

_UNDONE = {
    ChangeKind.LOAD: ChangeKind.UNLOAD,
    ChangeKind.FOLLOW: ChangeKind.UNLOAD,
    ChangeKind.LOAD_AT: ChangeKind.EVICT,
    ChangeKind.LOAD_URL: ChangeKind.EVICT,
    ChangeKind.REGISTER: ChangeKind.UNREGISTER,
}
"""The change that takes another one back."""
_MODELS = OF_MODELS - {ChangeKind.PURGE}

_log = structlog.get_logger("processes")


class Control:
    """Has changes made by every worker, and remembers them for workers that come later."""

    def __init__(self, workers: Callable[[], Sequence[WorkerProcess]]) -> None:
        self._workers = workers
        self._turns = Turns()
        self._numbers = itertools.count()
        self._purges = 0
        self._journal: dict[tuple[str, str], ChangeText] = {}
        """Changes since the start, in order; the last one of each subject."""

    # --- changes ---

    async def change(self, origin: WorkerProcess, ask: Ask) -> None:
        """Make a change that a worker asks for, and tell it how that went."""
        try:
            if ask.change.kind is ChangeKind.PURGE:
                failure = await self._purge(origin, ask)
            else:
                failure = await self._in_turn(origin, ask)
        except WorkerGone:
            return
        origin.tell(Settled(ask.number, failure))

    async def _in_turn(self, origin: WorkerProcess, ask: Ask) -> Failure | None:
        change, purges = ask.change, self._purges
        async with (
            self._turns.of((change.kind in _MODELS, change.subject)),
            self._held(change),
        ):
            if purges != self._purges:
                return self._refused(change)
            if not origin.makes(change.kind):
                return await self._by_engine(change)
            done = await origin.expect(Go(ask.number), ("done", ask.number))
            if done.failure is not None:
                return self._refused(change)
            others, failed = await self._by_others(origin, change)
            if not failed and purges == self._purges:
                self._remember(change)
                return None
            for worker, failure in failed.items():
                _log.error(
                    "a worker could not make a change that others made",
                    of=worker.role.worker,
                    kind=change.kind,
                    subject=change.subject,
                    error=failure.text,
                )
            made = [worker for worker in (origin, *others) if worker not in failed]
            await self._undo(change, made, failed, was_loaded=done.was_loaded)
            return next(iter(failed.values()), None) or self._refused(change)

    async def _by_engine(self, change: ChangeText) -> Failure | None:
        """Have the engine make a change that a front end asks for; all front ends show it then."""
        engine = next((one for one in self._workers() if one.makes(change.kind)), None)
        did = None if engine is None else await self._do(engine, change)
        if did is None:
            _remove(change)
            gone = EngineGone(change.subject)
            return Failure(type(gone).__name__, str(gone))
        if did.failure is None:
            self._remember(change)
        else:
            _remove(change)
        return did.failure

    async def _by_others(
        self, origin: WorkerProcess, change: ChangeText
    ) -> tuple[list[WorkerProcess], dict[WorkerProcess, Failure]]:
        """Have all others make a change; return them, and why it failed in some.

        Those that begin to make changes meanwhile too: what replays the journal to them does not
        know the change yet.
        """
        others: list[WorkerProcess] = []
        failed: dict[WorkerProcess, Failure] = {}
        while new := [
            one
            for one in self._workers()
            if one not in (origin, *others) and one.makes(change.kind)
        ]:
            results = await asyncio.gather(*(self._do(worker, change) for worker in new))
            for worker, did in zip(new, results, strict=True):
                if did is not None and did.failure is not None:
                    failed[worker] = did.failure
            others += new
        return others, failed

    @asynccontextmanager
    async def _held(self, change: ChangeText) -> AsyncIterator[None]:
        """Have no worker say, within a block, that a model is ready which others lack.

        Each has noted it before the block begins, and before what follows the block.
        """
        if change.kind not in _MODELS:
            yield
            return
        number, workers = next(self._numbers), self._workers()
        unloads = change.kind in (ChangeKind.UNLOAD, ChangeKind.EVICT)
        models = list(change.arguments.get("models") or [change.subject])
        try:
            await self._noted(workers, Hold(number, models, not unloads), number)
            yield
        finally:
            await self._noted(workers, Release(number), number)

    async def _noted(
        self, workers: Sequence[WorkerProcess], message: Hold | Release, number: int
    ) -> None:
        noted = (worker.expect(message, ("noted", number)) for worker in workers)
        for result in await asyncio.gather(*noted, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, WorkerGone):
                raise result

    async def _purge(self, origin: WorkerProcess, ask: Ask) -> Failure | None:
        """Have everything unloaded; what is being loaded meanwhile is cancelled."""
        self._purges += 1
        done = await origin.expect(Go(ask.number), ("done", ask.number))
        others = [worker for worker in self._workers() if worker is not origin]
        dids = await asyncio.gather(*(self._do(worker, ask.change) for worker in others))
        for key in [key for key, change in self._journal.items() if change.kind in _MODELS]:
            _remove(self._journal.pop(key))
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
            # What was there before is gone where the change was made: there is no way back. The
            # others are started anew, and then have what all have.
            self._remember(change)
            for worker in failed:
                worker.failure = f"it could not {change.kind} '{change.subject}' as others did"
                worker.kill()
            return
        arguments = {"models": [change.subject]} if kind is ChangeKind.UNLOAD else {}
        back = ChangeText(kind, change.subject, arguments)
        await asyncio.gather(*(self._do(worker, back) for worker in made))
        _remove(change)

    async def _do(self, worker: WorkerProcess, change: ChangeText) -> Did | None:
        """Have a worker make a change; None where it dies, and is replaced."""
        number = next(self._numbers)
        did: Did | None = None
        with suppress(WorkerGone):
            did = await worker.expect(Do(number, change), ("did", number))
        return did

    def _refused(self, change: ChangeText) -> Failure:
        _remove(change)
        return Failure("LoadCancelled", f"the load of '{change.subject}' was cancelled")

    # --- workers that come later ---

    def _remember(self, change: ChangeText) -> None:
        key = (str(change.kind) if change.kind not in _MODELS else "model", change.subject)
        before = self._journal.pop(key, None)
        if before is not None and before.files != change.files:
            _remove(before)
        match change.kind:
            case ChangeKind.EVICT:
                return
            case ChangeKind.UNREGISTER:
                for known in list(self._journal):
                    if known[0] == ChangeKind.REGISTER and change.subject in ("", known[1]):
                        del self._journal[known]
                return
            case ChangeKind.LOG | ChangeKind.TRACE if before is not None:
                arguments = {**before.arguments, **change.arguments}
                change = ChangeText(change.kind, change.subject, arguments)
        self._journal[key] = change

    async def replay(self, worker: WorkerProcess) -> None:
        """Return once a worker has made every change that the others have made."""
        for key in list(self._journal):
            change = self._journal.get(key)
            if change is None or not worker.makes(change.kind):
                continue
            async with self._turns.of((change.kind in _MODELS, change.subject)):
                change = self._journal.get(key)
                did = None if change is None else await self._do(worker, change)
            if did is not None and did.failure is not None:
                _log.error(
                    "a worker is without what others have",
                    of=worker.role.worker,
                    subject=key[1],
                    error=did.failure.text,
                )

    async def converge(self, worker: WorkerProcess) -> None:
        """Have all others load what a worker that has started found in the repository.

        Its files may be newer than those that the others loaded: a reload in which its predecessor
        died, or files that nobody has asked for yet. Where they are the same nothing is loaded.
        """
        if not worker.makes(ChangeKind.FOLLOW):
            return
        number = next(self._numbers)
        try:
            async with asyncio.timeout(QUESTION_SECONDS):
                reply = await worker.expect(Question(number, LOADED), ("reply", number))
        except (TimeoutError, WorkerGone) as error:
            _log.error(
                "not known what a worker has loaded", of=worker.role.worker, reason=str(error)
            )
            return
        for name in reply.said or ():
            change = ChangeText(ChangeKind.FOLLOW, name, {})
            async with self._turns.of((True, name)), self._held(change):
                last = self._journal.get(("model", name))
                if last is not None and (last.arguments or last.files):
                    continue  # loaded with what is not in the repository: all have the same
                _, failed = await self._by_others(worker, change)
            for other, failure in failed.items():
                _log.error(
                    "a worker has other files of a model than one that was started anew",
                    of=other.role.worker,
                    subject=name,
                    error=failure.text,
                )

    # --- questions ---

    async def ask_all(self, origin: WorkerProcess, ask: AskAll) -> None:
        """Ask all others a question, and give a worker their answers.

        One that is not ready yet has served nothing.
        """
        others = [one for one in self._workers() if one is not origin and one.is_ready]
        answers = await asyncio.gather(*(self._answer(worker, ask) for worker in others))
        origin.tell(Answers(ask.number, answers))

    async def _answer(self, worker: WorkerProcess, ask: AskAll) -> WorkerAnswer:
        name, number = worker.role.worker, next(self._numbers)
        try:
            async with asyncio.timeout(QUESTION_SECONDS):
                reply = await worker.expect(Question(number, ask.name, ask.said), ("reply", number))
        except TimeoutError:
            return WorkerAnswer(name, None, f"no answer within {QUESTION_SECONDS:.0f} s")
        except WorkerGone as error:
            return WorkerAnswer(name, None, str(error))
        return WorkerAnswer(name, reply.said, reply.problem)

    def close(self) -> None:
        """Remove the files of changes."""
        for change in self._journal.values():
            _remove(change)


def _remove(change: ChangeText) -> None:
    if change.files:
        with suppress(OSError):
            Path(change.files).unlink()
