"""Mirrors the engine's registry to front ends, once per loop iteration."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import structlog

from xlaserve.residence.lifecycle import State
from xlaserve.residence.registry import Instance, Model, Registry, Version
from xlaserve.tensors import TensorSpec
from xlaserve.workers.failures import sayable
from xlaserve.workers.fronts.description import UnknownDescription, described
from xlaserve.workers.fronts.records import Kind, Record

_log = structlog.get_logger("fronts")

_Row: TypeAlias = tuple[str, str, str, str, int, bytes, str, str]
"""A version: number (empty if the load failed before one was known), state, reason, fault, handle
(0 if none), description, digest of the tokenizer files (empty if none), and URL of the load (empty
if none)."""
_Entry: TypeAlias = tuple[_Row, ...]


def _row_of_model(reason: str) -> _Row:
    """Return the row, without a number, for a load that failed before a version was known."""
    return "", State.UNAVAILABLE.value, sayable(reason), "", 0, b"", "", ""


def _text_digest(instance: Instance) -> str:
    generation, embedding = instance.info.generation, instance.info.embedding
    if generation is not None and generation.text is not None:
        return generation.text.digest
    return "" if embedding is None or embedding.files is None else embedding.files.digest


class Viewer:
    """A front end that receives changes of the registry."""

    def __init__(self, say: Callable[[Record], None]) -> None:
        self.say = say
        self._shown = 0
        """The last revision that the front end acknowledged."""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def acknowledge(self, revision: int) -> None:
        """Record that the front end shows a revision."""
        self._shown = revision
        self._settle(revision)

    def leave(self) -> None:
        """Complete all waits for this front end."""
        for _, future in self._waiting:
            if not future.done():
                future.set_result(None)

    def shows(self, revision: int) -> "asyncio.Future[None]":
        """Return a future that completes when the front end shows a revision, or is gone."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((revision, future))
        self._settle(self._shown)
        return future

    def _settle(self, revision: int) -> None:
        for wanted, future in self._waiting:
            if wanted <= revision and not future.done():
                future.set_result(None)
        self._waiting = [pair for pair in self._waiting if not pair[1].done()]


class Passable(NamedTuple):
    """An instance that front ends may send requests to."""

    version: Version
    instance: Instance
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    positions: Mapping[str, int]
    """Positions of the outputs, by name."""


class Mirror:
    """Sends the engine's models to front ends. Used from the event loop only.

    Each instance has a handle. After an instance is removed, the mirror keeps it in use until every
    front end has acknowledged its removal, so that requests sent before are still served.
    """

    def __init__(self, registry: Registry, is_started: Callable[[], bool]) -> None:
        self._registry = registry
        self._is_started = is_started
        self._viewers: set[Viewer] = set()
        self._entries: dict[str, _Entry] = {}
        """Models as last sent, by name."""
        self._said_started = False
        self._revision = 0
        self._handles: WeakKeyDictionary[Instance, int] = WeakKeyDictionary()
        self.found: dict[int, Passable] = {}
        """Instances by handle, as long as a front end may send requests to them."""
        self._described: WeakKeyDictionary[Instance, bytes] = WeakKeyDictionary()
        self._last = 0
        """The last handle assigned."""
        self._is_scheduled = False
        self._leaving: set[asyncio.Task[None]] = set()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Send changes of the registry, for the duration of a block."""
        with self._registry.observe(self._schedule):
            yield

    def show(self, say: Callable[[Record], None]) -> Viewer:
        """Send all models to a new front end, and subscribe it to changes."""
        self._publish()
        viewer = Viewer(say)
        self._viewers.add(viewer)
        say((Kind.MODELS, self._revision, list(self._entries.items()), (), self._said_started))
        return viewer

    def show_no_more(self, viewer: Viewer) -> None:
        """Remove a front end whose process has ended."""
        self._viewers.discard(viewer)
        viewer.leave()

    async def shown(self) -> None:
        """Wait until every front end shows the current state."""
        self._publish()
        if waiting := [viewer.shows(self._revision) for viewer in self._viewers]:
            await asyncio.wait(waiting)

    # --- Changes ---

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._publish_scheduled)

    def _publish_scheduled(self) -> None:
        self._is_scheduled = False
        self._publish()

    def _publish(self) -> None:
        failed = self._registry.failed.reasons
        now = {model.name: self._entry(model) for model in self._registry.models()}
        for name, reason in failed.items():
            now[name] = (*now.get(name, ()), _row_of_model(reason))
        changed = [(name, entry) for name, entry in now.items() if self._entries.get(name) != entry]
        gone = [name for name in self._entries if name not in now]
        is_started = self._is_started()
        if not changed and not gone and is_started == self._said_started:
            return
        self._entries, self._said_started = now, is_started
        self._revision += 1
        for viewer in self._viewers:
            viewer.say((Kind.MODELS, self._revision, changed, gone, is_started))

    def _entry(self, model: Model) -> _Entry:
        return tuple([self._row(version) for version in model.versions.values()])

    def _row(self, version: Version) -> _Row:
        state, instance = version.state, version.instance
        start = version.number, state.value, sayable(version.lifecycle.reason)
        if instance is None or not state.answers:
            return *start, "", 0, b"", "", ""
        handle = self._handles.get(instance)
        if handle is None:
            try:
                handle = self._given(version, instance)
            except UnknownDescription as error:
                _log.exception("model not describable", model=version.model)
                reason = f"it cannot be sent to front ends: {error}"
                return version.number, State.UNAVAILABLE.value, reason, "", 0, b"", "", ""
        described = self._described[instance]
        text = _text_digest(instance)
        return *start, sayable(instance.fault), handle, described, text, instance.url

    def _given(self, version: Version, instance: Instance) -> int:
        self._last = handle = self._last + 1
        self._described[instance] = described(instance.info, instance.config)
        self._handles[instance] = handle
        info = instance.info
        positions = {spec.name: at for at, spec in enumerate(info.outputs)}
        self.found[handle] = Passable(version, instance, info.inputs, info.outputs, positions)
        instance.on_leave(partial(self._leaves, handle, instance))
        return handle

    def _leaves(self, handle: int, instance: Instance) -> None:
        instance.acquire()
        leaving = asyncio.ensure_future(self._left(handle, instance))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _left(self, handle: int, instance: Instance) -> None:
        try:
            await self.shown()
        finally:
            del self.found[handle]
            instance.release()
