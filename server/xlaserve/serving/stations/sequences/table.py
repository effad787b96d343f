"""State of a model's sequences: those in progress, their slots, and queued requests.

Independent of asyncio, clocks and calls: requests are turns, and times are arguments.

At most one turn of a sequence is with the batcher; later ones wait for it. A sequence without a
slot waits in the backlog until another one ends. A sequence's state results from exactly the turns
executed, in order: if one is not executed, the waiting ones that build on it are refused.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias

from xlaserve.errors.sequence import SequenceNotStarted
from xlaserve.runtime.sequential import SequenceId


@dataclass(frozen=True, slots=True)
class Seat:
    """A slot of a replica."""

    replica: int
    slot: int


@dataclass(slots=True, eq=False)
class Turn:
    """One request in a sequence."""

    call: Any
    """The request, which the table does not inspect."""
    id: SequenceId
    is_start: bool = False
    is_end: bool = False
    is_begun: bool = False
    """Whether the request's execution has begun; set by the runner."""
    is_settled: bool = False
    """Whether the request's outcome was recorded before its batch ended."""
    seat: Seat | None = None
    """The request's slot, set when the request becomes ready."""
    owner: str = ""
    """Owner of the sequence: ids are scoped by caller."""

    @property
    def key(self) -> "Key":
        """Return the key of the request's sequence."""
        return self.owner, self.id


Key: TypeAlias = tuple[str, SequenceId]
"""Owner and id of a sequence."""


@dataclass(slots=True)
class Changed:
    """Consequences of a change to the table."""

    ready: list[Turn] = field(default_factory=list)
    """Turns ready for execution."""
    refused: list[Turn] = field(default_factory=list)
    """Turns refused because an earlier one was not executed."""
    expired: list[tuple[SequenceId, Seat]] = field(default_factory=list)
    """Expired sequences and their slots."""

    def __iadd__(self, other: "Changed") -> "Changed":
        """Append later changes."""
        self.ready += other.ready
        self.refused += other.refused
        self.expired += other.expired
        return self


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence in progress."""

    id: SequenceId
    key: Key
    waiting: deque[Turn] = field(default_factory=deque)
    running: Turn | None = None
    """The turn that the batcher has."""
    seat: Seat | None = None
    has_state: bool = False
    """Whether a turn was executed that did not end the sequence."""

    @property
    def is_open(self) -> bool:
        """Tell whether the sequence accepts another request."""
        last = self.waiting[-1] if self.waiting else self.running
        return self.has_state if last is None else not last.is_end


class _Slots:
    """The free slots of one replica; the lowest is taken first, which keeps batches dense."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        heapify(self.free)

    def __len__(self) -> int:
        return len(self.free)


class SequenceTable:
    """The sequences of one loaded model; belongs to the event loop."""

    def __init__(
        self, model: str, replicas: int, slots: int, idle_ns: int, *, processes: int = 1
    ) -> None:
        """`processes` is the number of server processes; each has its own sequences."""
        self._model = model
        self._processes = processes
        self._idle_ns = idle_ns
        self._live: dict[Key, _Sequence] = {}
        self._slots = [_Slots(slots) for _ in range(replicas)]
        self._backlog: dict[_Sequence, None] = {}
        """Sequences waiting for a slot, in arrival order."""
        self._idle: dict[_Sequence, int] = {}
        """Idle sequences with the start of their idle time, oldest first."""

    @property
    def in_progress(self) -> int:
        """Return the number of sequences, including those waiting for a slot."""
        return len(self._live)

    def backlog(self) -> Iterator[Turn]:
        """Yield the first turn of each sequence waiting for a slot."""
        return (sequence.waiting[0] for sequence in self._backlog)

    def add(self, turn: Turn) -> Changed:
        """Enqueue a turn; raises SequenceNotStarted if its sequence is not in progress.

        A start within a sequence restarts it after the queued turns.
        """
        sequence = self._live.get(turn.key)
        if not turn.is_start and (sequence is None or not sequence.is_open):
            raise SequenceNotStarted(self._model, turn.id, self._processes)
        if sequence is None:
            sequence = self._live[turn.key] = _Sequence(turn.id, turn.key)
            self._seat(sequence)
        self._idle.pop(sequence, None)
        sequence.waiting.append(turn)
        return Changed(ready=list(self._next(sequence)))

    def __contains__(self, key: Key) -> bool:
        """Tell whether a sequence is in progress."""
        return key in self._live

    def again(self, turn: Turn, following: Turn) -> Changed:
        """Reschedule an executed turn, ahead of the queued ones."""
        sequence = self._live[turn.key]
        sequence.running = None
        sequence.has_state = True
        sequence.waiting.appendleft(following)
        return Changed(ready=list(self._next(sequence)))

    def drop(self, turn: Turn, now_ns: int, *, ends: bool = False) -> Changed:
        """Remove a turn that has not begun, and refuse those that build on it.

        With `ends`, its sequence ends.
        """
        sequence = self._live[turn.key]
        if ends:
            sequence.has_state = False
        if sequence.running is turn:
            sequence.running = None
            refused = self._interrupt(sequence)
        else:
            before: list[Turn] = []
            while (first := sequence.waiting.popleft()) is not turn:
                before.append(first)
            refused = self._interrupt(sequence)
            sequence.waiting.extendleft(reversed(before))
        return Changed(list(self._go_on(sequence, now_ns)), refused)

    def executed(self, turns: Sequence[Turn], now_ns: int) -> Changed:
        """Record executed turns."""
        changed = Changed()
        for turn in turns:
            sequence = self._live[turn.key]
            sequence.running = None
            sequence.has_state = not turn.is_end
            if turn.is_end and sequence.waiting and self._backlog:
                # The sequence's next turn restarts it, so sequences that have waited longer get the
                # slot first.
                changed.ready.extend(self._leave_seat(sequence))
                self._backlog[sequence] = None
            changed.ready.extend(self._go_on(sequence, now_ns))
        return changed

    def failed(self, turns: Sequence[Turn], now_ns: int) -> Changed:
        """Record failed turns, which leave their sequences' states unchanged."""
        changed = Changed()
        for turn in turns:
            sequence = self._live[turn.key]
            sequence.running = None
            changed.refused.extend(self._interrupt(sequence))
            changed.ready.extend(self._go_on(sequence, now_ns))
        return changed

    def lost(self, replica: int, now_ns: int) -> Changed:
        """Record that the states of a replica are lost: its sequences must be restarted.

        Turns that have begun end by themselves; queued turns are refused, except starts.
        """
        changed = Changed()
        for sequence in list(self._live.values()):
            if sequence.seat is None or sequence.seat.replica != replica:
                continue
            sequence.has_state = False
            running = sequence.running
            # If no turn is with the batcher, none is waiting.
            if running is not None and not (running.is_start or running.is_begun):
                sequence.running = None
                changed.refused += [running, *self._interrupt(sequence)]
            changed.ready.extend(self._go_on(sequence, now_ns))
        return changed

    def expire(self, now_ns: int) -> Changed:
        """End sequences that have been idle too long."""
        changed = Changed()
        while self._idle and (due := self.due_ns) is not None and due <= now_ns:
            sequence = next(iter(self._idle))
            assert sequence.seat is not None, "its requests were executed"
            changed.expired.append((sequence.id, sequence.seat))
            changed.ready.extend(self._end(sequence))
        return changed

    @property
    def due_ns(self) -> int | None:
        """Return the time at which the next sequence expires; None if none is idle."""
        oldest = next(iter(self._idle.values()), None)
        return None if oldest is None else oldest + self._idle_ns

    # --- one sequence ---

    def _next(self, sequence: _Sequence) -> Iterator[Turn]:
        """Yield the next turn of a sequence if it is ready."""
        if sequence.seat is not None and sequence.running is None and sequence.waiting:
            turn = sequence.running = sequence.waiting.popleft()
            turn.seat = sequence.seat
            yield turn

    def _go_on(self, sequence: _Sequence, now_ns: int) -> Iterator[Turn]:
        """Yield the next ready turn, of this sequence or of the one that gets its slot."""
        if sequence.running is not None:
            return
        if sequence.waiting:
            yield from self._next(sequence)
        elif sequence.has_state:
            self._idle[sequence] = now_ns
        else:
            yield from self._end(sequence)

    def _interrupt(self, sequence: _Sequence) -> list[Turn]:
        """Remove and return the queued turns up to the next start."""
        refused = []
        while sequence.waiting and not sequence.waiting[0].is_start:
            refused.append(sequence.waiting.popleft())
        return refused

    def _end(self, sequence: _Sequence) -> Iterator[Turn]:
        del self._live[sequence.key]
        self._idle.pop(sequence, None)
        self._backlog.pop(sequence, None)
        yield from self._leave_seat(sequence)

    # --- slots ---

    def _seat(self, sequence: _Sequence) -> None:
        """Assign a slot on the replica with the most free ones, or join the backlog."""
        replica = max(range(len(self._slots)), key=lambda index: len(self._slots[index]))
        free = self._slots[replica].free
        if free:
            sequence.seat = Seat(replica, heappop(free))
        else:
            self._backlog[sequence] = None

    def _leave_seat(self, sequence: _Sequence) -> Iterator[Turn]:
        """Free a sequence's slot, and give it to the sequence that has waited longest."""
        seat, sequence.seat = sequence.seat, None
        if seat is None:
            return
        heappush(self._slots[seat.replica].free, seat.slot)
        first = next(iter(self._backlog), None)
        if first is not None:
            del self._backlog[first]
            self._seat(first)
            yield from self._next(first)
