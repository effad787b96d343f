"""The control plane in a worker, which coordinates changes through the parent."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import structlog

from xlaserve.concurrency.control_plane import (
    OF_LOADS,
    OF_MODELS,
    Answer,
    Change,
    ChangeKind,
    ChangeText,
    Make,
)
from xlaserve.concurrency.control_plane import Reply as AnswerHere
from xlaserve.errors import (
    LoadCancelled,
    ProcessSilent,
    ShuttingDown,
    TooManyChanges,
    XlaserveError,
)
from xlaserve.residence.handover import spool
from xlaserve.residence.repository.exhaustion import write_failure
from xlaserve.serving.access.sight import everything, seen_now
from xlaserve.serving.observability.event_notes import because
from xlaserve.serving.observability.events import Cause
from xlaserve.workers.channel import Channel, ChannelError
from xlaserve.workers.failures import error_of, failure_of
from xlaserve.workers.messages import (
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
    Noted,
    Question,
    Release,
    Reply,
    Settled,
    State,
    ToWorker,
)

MOST_PENDING = 1024
"""Maximum number of pending changes of this process's clients, including disconnected ones."""
_NEVER_REFUSED = frozenset({ChangeKind.FOLLOW, ChangeKind.PURGE})
"""Changes exempt from MOST_PENDING: there are few, and nobody would retry them."""

ENGINE = 0
"""Number of the engine process."""

T = TypeVar("T")
_log = structlog.get_logger("worker")


class Link:
    """Makes changes of the server in this process, in the parent's order. Event loop only."""

    def __init__(
        self, channel: "Channel[ToWorker]", scratch_directory: Path, *, loads: bool = True
    ) -> None:
        """`loads` tells whether this process loads models; front ends leave that to the engine."""
        self._channel = channel
        self._scratch = scratch_directory
        self._numbers = itertools.count()
        self._turns: dict[int, asyncio.Future[None]] = {}
        """Futures of changes that wait for Go."""
        self._settled: dict[int, asyncio.Future[Failure | None]] = {}
        self._asking: set[int] = set()
        """Changes requested from the parent."""
        self._questions: dict[int, asyncio.Future[Sequence[Answer]]] = {}
        self._makes: dict[ChangeKind, Make] = {}
        self._replies: dict[str, AnswerHere] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._making: dict[int, asyncio.Future[Any]] = {}
        """Changes requested by clients of this process and being made here, by number."""
        self._doing: dict[int, asyncio.Task[Failure | None]] = {}
        """Changes requested in other processes and being made here, by number."""
        self.loads = loads
        self.is_whole = False
        """Whether the engine has all the models that clients loaded."""
        self._is_ready = False
        self._hears = True
        self.silent: frozenset[int] = frozenset()
        """Numbers of unresponsive processes."""
        self.leads = False
        self.has_started = False
        self._held: dict[int, Mapping[str, frozenset[str]]] = {}
        """For each held change: its models, with the versions that stay ready."""
        self.shown: Callable[[], Awaitable[None]] | None = None
        """In an engine, waits until all front ends show the loaded models; None in other
        processes."""
        self.on_state: Callable[[], None] = lambda: None
        """Called when `is_ready` may have changed."""
        self.is_loaded: Callable[[str], bool] = lambda _: False
        """Tells whether a model is loaded in this process."""
        self.versions: Callable[[str], frozenset[str]] = lambda _: frozenset()
        """Returns the ready versions of a model in this process."""

    # --- Control plane ---

    @property
    def is_ready(self) -> bool:
        """Whether every process is ready; False while the parent is unresponsive."""
        return self._is_ready and self._hears

    @property
    def engine_answers(self) -> bool:
        """Tell whether the engine is responsive; True in processes that load models."""
        return self.loads or ENGINE not in self.silent

    def conceals(self, model: str, version: str = "") -> bool:
        """Tell whether a model must appear not ready, because other processes lack it."""
        if not self.has_started or not self.engine_answers:
            return True
        staying = [held[model] for held in self._held.values() if model in held]
        return any(version not in kept if version else not kept for kept in staying)

    def handle(self, kind: ChangeKind, make: Make) -> None:
        """Set the function that makes changes of a kind requested in other processes."""
        self._makes[kind] = make

    def answer(self, question: str, reply: AnswerHere) -> None:
        """Set the function that answers a question from other processes."""
        self._replies[question] = reply

    async def apply(self, change: Change, here: Callable[[], Awaitable[T]]) -> T:
        """Make a change here and in all other processes; return the result of `here`.

        If its client disconnects, a load is cancelled everywhere. Other changes continue, since
        otherwise only some processes would have made them. Raises TooManyChanges; OutOfSpace or
        LoadFailed if its files cannot be written for the other processes; and the exceptions of
        `here` and of other processes.
        """
        if len(self._settled) >= MOST_PENDING and change.kind not in _NEVER_REFUSED:
            raise TooManyChanges(change.kind, change.subject, MOST_PENDING)
        number = next(self._numbers)
        applying = self._task(self._apply(number, change, here))
        try:
            return await asyncio.shield(applying)
        except asyncio.CancelledError:
            if change.kind in OF_LOADS and not applying.done():
                if number in self._asking:
                    self._tell(GiveUp(number))
                else:
                    applying.cancel()  # the parent does not know the change yet
                if (making := self._making.get(number)) is not None:
                    making.cancel()
            raise

    async def ask_all(self, question: str, content: Any = None) -> Sequence[Answer]:
        """Return the answers of all other processes, or the reasons why they did not answer."""
        number = next(self._numbers)
        answers: asyncio.Future[Sequence[Answer]]
        answers = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(AskAll(number, question, content))
            return await answers
        except ChannelError:
            return ()
        finally:
            self._questions.pop(number, None)

    async def _apply(self, number: int, change: Change, here: Callable[[], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        text = ChangeText(change.kind, change.subject, dict(change.arguments))
        turn = self._turns[number] = loop.create_future()
        settled = self._settled[number] = loop.create_future()
        try:
            if change.files:
                text = msgspec.structs.replace(text, files=await self._spooled(change))
            self._channel.send(Ask(number, text, seen_now() is not everything))
            self._asking.add(number)
            await asyncio.wait((turn, settled), return_when=asyncio.FIRST_COMPLETED)
            if settled.done():
                failure = settled.result()
                if failure is None and not self.loads and change.kind in OF_MODELS:
                    return cast(T, None)  # the engine has made the change
                raise ShuttingDown if failure is None else error_of(failure)
            was_loaded = self.is_loaded(change.subject)
            try:
                making = asyncio.ensure_future(self._and_shown(here()))
                self._making[number] = making
                result = await making
            except BaseException as error:
                self._channel.send(Done(number, failure_of(error), was_loaded))
                raise
            finally:
                self._making.pop(number, None)
            self._channel.send(Done(number, None, was_loaded))
            failure = await settled
        except ChannelError:
            raise ShuttingDown from None
        finally:
            del self._turns[number], self._settled[number]
            self._asking.discard(number)
        if failure is not None:
            raise error_of(failure)
        return result

    async def _spooled(self, change: Change) -> str:
        data = msgspec.msgpack.encode(change.files)
        writing = asyncio.ensure_future(asyncio.to_thread(spool, self._scratch, data))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(_remove_spooled)
            raise
        except OSError as error:
            raise write_failure(change.subject, error) from error

    # --- Messages from the parent ---

    def heard(self, message: ToWorker) -> None:
        """Handle a message from the parent about changes, questions or the state."""
        match message:
            case Go(number):
                self._may_go(number)
            case Settled(number, failure):
                _settle(self._settled.get(number), failure)
            case Do(number, change):
                was_loaded = self.is_loaded(change.subject)
                doing = self._doing[number] = self._task(self._do(change))
                # A callback also reports tasks that were cancelled before they started.
                doing.add_done_callback(partial(self._did, number, change, was_loaded))
            case GiveUp(number) if number in self._doing:
                self._doing[number].cancel()
            case Question(number, name, content):
                self._task(self._reply(number, name, content))
            case Answers(number, answers):
                found = [Answer(one.worker, one.said, one.problem) for one in answers]
                _settle(self._questions.get(number), found)
            case State(is_ready, leads, has_started, is_whole, silent):
                self._is_ready, self.leads, self.silent = is_ready, leads, frozenset(silent)
                self.has_started, self.is_whole = has_started, is_whole
                self.on_state()
            case Hold() | Release():
                self._hold(message)
            case _:
                pass

    def _may_go(self, number: int) -> None:
        if number not in self._turns:
            # The change was cancelled before the parent's Go arrived.
            gone = LoadCancelled("a change without waiting callers")
            self._tell(Done(number, failure_of(gone)))
        _settle(self._turns.get(number), None)

    def _hold(self, message: Hold | Release) -> None:
        number = message.number
        if isinstance(message, Hold):
            kept = self.versions if message.reloads else lambda _: frozenset[str]()
            self._held[number] = {model: kept(model) for model in message.models}
        else:
            self._held.pop(number, None)
        is_loaded = isinstance(message, Hold) and any(map(self.is_loaded, message.models))
        self.on_state()
        self._tell(Noted(number, is_loaded))

    def hears(self, hears: bool) -> None:
        """Set whether the parent is responsive; if not, this process reports not ready."""
        if hears is not self._hears:
            self._hears = hears
            self.on_state()

    def hears_no_more(self) -> None:
        """Fail everything that waits for the parent."""
        waiting: list[asyncio.Future[Any]] = [*self._settled.values(), *self._questions.values()]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(ProcessSilent("a change or a question of all", "parent"))

    async def _do(self, text: ChangeText) -> Failure | None:
        try:
            files: dict[str, bytes] = {}
            if text.files:
                data = await asyncio.to_thread(Path(text.files).read_bytes)
                files = msgspec.msgpack.decode(data, type=dict[str, bytes])
            with because(Cause.OTHER_WORKER):
                change = Change(text.kind, text.subject, text.arguments, files)
                await self._and_shown(self._makes[text.kind](change))
        except XlaserveError as error:
            return failure_of(error)
        except asyncio.CancelledError:
            return failure_of(LoadCancelled(text.subject))
        except BaseException as error:
            _log.exception("change to this worker failed", kind=text.kind, subject=text.subject)
            return failure_of(error)
        return None

    def _did(
        self, number: int, text: ChangeText, was_loaded: bool, done: "asyncio.Task[Failure | None]"
    ) -> None:
        self._doing.pop(number, None)
        given_up = done.cancelled()
        failure = failure_of(LoadCancelled(text.subject)) if given_up else done.result()
        self._tell(Did(number, failure, was_loaded))

    async def _and_shown(self, making: Awaitable[T]) -> T:
        """Await a change, then wait until the front ends of this engine show its effect."""
        try:
            return await making
        finally:
            if self.shown is not None:
                await self.shown()

    async def _reply(self, number: int, name: str, content: Any) -> None:
        try:
            reply = Reply(number, await self._replies[name](content))
        except XlaserveError as error:
            reply = Reply(number, None, str(error))
        except BaseException as error:
            _log.exception("question not answered", question=name)
            reply = Reply(number, None, f"{type(error).__name__}: {error}")
        try:
            self._tell(reply)
        except (TypeError, ValueError) as error:
            self._tell(Reply(number, None, str(error)))

    def _tell(self, message: msgspec.Struct) -> None:
        try:
            self._channel.send(message)
        except ChannelError as error:
            _log.warning("parent not reachable", reason=str(error))

    def _task(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Retrieve the exception, so that asyncio does not report it after the client has left.
            task.exception()


def _remove_spooled(writing: "asyncio.Future[str]") -> None:
    """Remove the file of an abandoned change once it is written."""
    if not writing.cancelled() and writing.exception() is None:
        with suppress(OSError):
            Path(writing.result()).unlink()


def _settle(future: "asyncio.Future[Any] | None", value: object) -> None:
    if future is not None and not future.done():
        future.set_result(value)
