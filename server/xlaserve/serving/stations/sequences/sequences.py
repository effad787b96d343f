"""Sequence batching: each sequence in order, several sequences in one batch (a Station)."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from xlaserve.errors import Decoupled, InvalidParameter
from xlaserve.errors.sequence import MissingSequence, SequenceInterrupted, SequenceRows, StatesLost
from xlaserve.runtime.sequential import SequenceId, SequentialModel
from xlaserve.serving.answers import deliver
from xlaserve.serving.infer_call import Executed, InferCall
from xlaserve.serving.stations.batching import Batcher, Clock
from xlaserve.serving.stations.sequences.table import Changed, Seat, SequenceTable, Turn
from xlaserve.serving.stations.unending import Unending

_MOST_IDS = (1 << 31) - 1
"""Range of generated ids for iterative sequences: fits every datatype of CORRID."""

MAX_ID_CHARACTERS = 128
"""Maximum length of a sequence id, as in Triton."""


class Sequences:
    """Executes the requests of each sequence in order."""

    def __init__(
        self,
        model: SequentialModel,
        table: SequenceTable,
        clock: Clock,
        make_batcher: "Callable[[Sequences, int], Batcher]",
        *,
        on_expired: Callable[[SequenceId, Seat], None] = lambda sequence, seat: None,
        unending: Unending | None = None,
    ) -> None:
        """`make_batcher` creates the batcher of a replica.

        `on_expired` is called with expired sequences. `unending` gets calls with any number of
        answers.
        """
        self._model = model
        self._is_iterative = model.batching.is_iterative
        self._last_id = 0
        self._on_expired = on_expired
        self._unending = unending
        self._table = table
        self._clock = clock
        # A weak reference, since the station owns the batchers.
        this: Sequences = weakref.proxy(self)
        self._batchers = [make_batcher(this, replica) for replica in range(model.replicas)]
        self._due_ns: int | None = None
        """Time of the next expiry check; None if no timer is set."""

    @property
    def in_progress(self) -> int:
        """Return the number of clients' sequences; iterative ones end with their request."""
        return 0 if self._is_iterative else self._table.in_progress

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of queued requests."""
        for turn in self._table.backlog():
            yield turn.call.submitted_ns
        for batcher in self._batchers:
            yield from batcher.pending_since()

    def begin(self, call: InferCall) -> None:
        """Execute a call after the earlier ones of its sequence.

        Raises MissingSequence, SequenceNotStarted, SequenceRows, InvalidParameter for an id that
        the model's datatype cannot represent, or Decoupled.
        """
        if call.rows != 1:
            raise SequenceRows(call.instance.model, call.rows)
        if self._unending is not None and not call.takes_many:
            raise Decoupled(call.instance.model)
        parameters, owner = call.parameters, call.owner
        if self._is_iterative and not parameters.get("sequence_id"):
            own = {"sequence_id": self._new_id(), "sequence_start": True}
            owner = ""
            parameters = call.parameters = {**parameters, **own}
        sequence = parameters.get("sequence_id")
        if not sequence:
            raise MissingSequence(call.instance.model)
        assert isinstance(sequence, SequenceId)
        if isinstance(sequence, str) and len(sequence) > MAX_ID_CHARACTERS:
            expected = f"a string of at most {MAX_ID_CHARACTERS} characters"
            raise InvalidParameter("sequence_id", expected, f"{len(sequence)} characters")
        self._model.check_id(sequence)
        turn = Turn(
            call,
            sequence,
            bool(parameters.get("sequence_start")),
            bool(parameters.get("sequence_end")),
            owner=owner,
        )
        call.submitted_ns = call.submitted_ns or self._clock.now_ns()
        changed = self._table.add(turn)
        call.turn = turn
        call.wait_at(self)
        self._follow(changed)
        if self._unending is not None and not call.has_ended:
            self._unending.add(call)

    def _new_id(self) -> int:
        """Return an id that no current sequence has."""
        while True:
            self._last_id = self._last_id % _MOST_IDS + 1
            if ("", self._last_id) not in self._table:
                return self._last_id

    def again(self, call: InferCall) -> None:
        """Reschedule a call as the next step of its iterative sequence."""
        turn = call.turn
        assert turn is not None
        turn.is_settled = True
        following = Turn(call, turn.id, owner=turn.owner)
        changed = self._table.again(turn, following)
        call.turn = following
        call.parameters = {**call.parameters, "sequence_start": False}
        call.wait_at(self)
        self._follow(changed)

    def retire(self) -> Sequence[InferCall]:
        """Return nothing: another station could not continue the sequences."""
        return ()

    def leave(self, call: InferCall) -> None:
        """Drop a queued call that has ended, and refuse the later ones of its sequence."""
        turn = call.turn
        assert turn is not None
        if turn.is_begun:
            return  # it still advances the sequence's state; only its answer is dropped
        if turn.seat is not None:
            self._batchers[turn.seat.replica].leave(call)
        now = self._clock.now_ns()
        self._follow(self._table.drop(turn, now, ends=self._is_iterative))

    def delivered(
        self, replica: int, calls: Sequence[InferCall], result: Executed | BaseException
    ) -> None:
        """Answer the calls of a batch, and continue their sequences."""
        if self._is_iterative and not isinstance(result, BaseException):
            return  # each call has been settled or rescheduled
        now = self._clock.now_ns()
        turns = [turn for call in calls if (turn := call.turn) and not turn.is_settled]
        if isinstance(result, BaseException):
            changed = self._table.failed(turns, now)
            if isinstance(result, StatesLost):
                changed += self._table.lost(replica, now)
        else:
            changed = self._table.executed(turns, now)
        # Some models answer each call themselves.
        if not all(call.has_ended for call in calls):
            deliver(calls, result)
        self._follow(changed)

    def settle(self, call: InferCall, *, has_failed: bool) -> None:
        """Continue the sequence of a call that ends before its batch.

        Called before the answer is written, because the client may then send its next request.
        """
        turn, now = call.turn, self._clock.now_ns()
        assert turn is not None
        turn.is_settled = True
        change = self._table.failed if has_failed else self._table.executed
        self._follow(change([turn], now))

    def _follow(self, changed: Changed) -> None:
        """Submit the turns that have become ready, and refuse the interrupted ones."""
        for turn in changed.refused:
            call: InferCall = turn.call
            call.place = None
            if turn.seat is not None:
                self._batchers[turn.seat.replica].leave(call)
        if changed.refused:
            # In a later iteration: this may run while another call is ending.
            self._clock.soon(partial(self._refuse, changed.refused))
        for turn in changed.ready:
            assert turn.seat is not None
            self._batchers[turn.seat.replica].submit(turn.call)
            turn.call.wait_at(self)
        self._wake_later()

    def _refuse(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            model = turn.call.instance.model
            deliver([turn.call], SequenceInterrupted(model, turn.id))

    # --- expiry of sequences ---

    def _wake_later(self) -> None:
        due = self._table.due_ns
        if self._due_ns is None and due is not None:
            self._due_ns = due
            # A weak reference: a pending timer must not keep an unloaded model alive.
            self._clock.at(due, partial(_wake, weakref.ref(self)))

    def wake(self) -> None:
        """End expired sequences."""
        self._due_ns = None
        changed = self._table.expire(self._clock.now_ns())
        # Send the requests with END before another sequence gets the slot.
        for sequence, seat in changed.expired:
            self._on_expired(sequence, seat)
        self._follow(changed)


def _wake(station: "weakref.ref[Sequences]") -> None:
    found = station()
    if found is not None:
        found.wake()
