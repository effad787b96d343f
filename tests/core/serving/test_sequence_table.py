"""The table of sequences: order, slots, and the state after a request that was not executed."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.errors.sequence import SequenceNotStarted
from xlaserve.serving.stations.sequences.table import Changed, Seat, SequenceTable, Turn

IDLE_NS = 1000


def table(slots: int = 2, replicas: int = 1) -> SequenceTable:
    return SequenceTable("m", replicas, slots, IDLE_NS)


def turn(id: int | str = 1, flags: str = "") -> Turn:
    """Make a turn; `s` in `flags` starts a sequence and `e` ends it."""
    return Turn(None, id, "s" in flags, "e" in flags)


def slot_of(made: Turn) -> tuple[int, int]:
    assert made.seat is not None
    return made.seat.replica, made.seat.slot


def test_an_unknown_sequence_may_be_in_another_process() -> None:
    """Clients see a single server; the error saves them from looking for a mistake of their own."""
    of_two = SequenceTable("m", 1, 2, IDLE_NS, processes=2)
    with pytest.raises(SequenceNotStarted, match="another of the server's 2 processes"):
        of_two.add(turn())
    with pytest.raises(SequenceNotStarted, match="of the sequence$"):
        table().add(turn())


def test_turns_of_a_sequence_follow_one_another() -> None:
    sequences = table()
    first, second = turn(flags="s"), turn()

    assert sequences.add(first).ready == [first]
    assert sequences.add(second).ready == []
    assert sequences.executed([first], 0).ready == [second]
    assert slot_of(first) == slot_of(second)


def test_sequences_have_slots_of_their_own() -> None:
    sequences = table(slots=2, replicas=2)
    turns = [turn(id, "s") for id in range(1, 5)]
    for one in turns:
        sequences.add(one)

    assert {(0, 0), (0, 1), (1, 0), (1, 1)} == {slot_of(one) for one in turns}


@pytest.mark.parametrize("executed", [False, True])
def test_a_sequence_that_has_ended_must_be_started(executed: bool) -> None:
    sequences, last = table(), turn(flags="se")
    sequences.add(last)
    if executed:
        sequences.executed([last], 0)

    with pytest.raises(SequenceNotStarted):
        sequences.add(turn())
    with pytest.raises(SequenceNotStarted):
        sequences.add(turn(id=2))


def test_one_more_sequence_than_there_are_slots_waits_for_the_end_of_another() -> None:
    sequences = table(slots=1)
    first, other, last = turn(1, "s"), turn(2, "s"), turn(1, "e")
    sequences.add(first)

    assert sequences.add(other).ready == []
    assert len(list(sequences.backlog())) == 1
    sequences.executed([first], 0)
    sequences.add(last)
    assert sequences.executed([last], 0).ready == [other]
    assert slot_of(other) == slot_of(first)
    assert len(list(sequences.backlog())) == 0


def test_a_sequence_that_starts_again_waits_behind_those_without_a_slot() -> None:
    sequences = table(slots=1)
    first, other, again = turn(1, "se"), turn(2, "se"), turn(1, "se")
    for one in (first, other, again):
        sequences.add(one)

    assert sequences.executed([first], 0).ready == [other]
    assert sequences.executed([other], 0).ready == [again]
    sequences.executed([again], 0)
    assert sequences.in_progress == 0


def test_a_start_in_the_middle_begins_anew_in_the_same_slot() -> None:
    sequences = table()
    first, again, second = turn(flags="s"), turn(flags="s"), turn()
    for one in (first, again, second):
        sequences.add(one)

    assert sequences.executed([first], 0).ready == [again]
    assert sequences.executed([again], 0).ready == [second]
    assert slot_of(first) == slot_of(again)


def test_an_idle_sequence_expires_and_frees_its_slot() -> None:
    sequences = table(slots=1)
    first, other = turn(1, "s"), turn(2, "s")
    sequences.add(first)
    sequences.executed([first], 5)
    sequences.add(other)

    assert sequences.due_ns == 5 + IDLE_NS
    assert sequences.expire(4 + IDLE_NS).ready == []
    assert sequences.expire(5 + IDLE_NS).ready == [other]
    with pytest.raises(SequenceNotStarted):
        sequences.add(turn(1))


def test_a_sequence_with_a_request_does_not_expire() -> None:
    sequences = table()
    first, second = turn(flags="s"), turn()
    sequences.add(first)
    sequences.executed([first], 0)
    sequences.add(second)

    assert sequences.due_ns is None
    assert sequences.expire(10 * IDLE_NS) == Changed()
    sequences.executed([second], 20)
    assert sequences.due_ns == 20 + IDLE_NS


def test_a_turn_that_is_dropped_takes_those_behind_it_along_up_to_a_start() -> None:
    sequences = table()
    turns = [turn(flags="s"), turn(), turn(), turn(flags="e"), turn(flags="s"), turn()]
    for one in turns:
        sequences.add(one)
    changed = sequences.drop(turns[2], 0)

    assert changed.refused == [turns[3]]
    assert sequences.executed([turns[0]], 0).ready == [turns[1]]
    assert sequences.executed([turns[1]], 0).ready == [turns[4]]
    assert sequences.executed([turns[4]], 0).ready == [turns[5]]


def test_a_sequence_whose_start_is_dropped_was_never_there() -> None:
    sequences = table(slots=1)
    first, second, other = turn(1, "s"), turn(1), turn(2, "s")
    for one in (first, second, other):
        sequences.add(one)
    changed = sequences.drop(first, 0)

    assert changed == Changed(ready=[other], refused=[second])
    with pytest.raises(SequenceNotStarted):
        sequences.add(turn(1))


def test_a_sequence_that_is_dropped_in_the_backlog_leaves_it() -> None:
    sequences = table(slots=1)
    first, other = turn(1, "s"), turn(2, "s")
    sequences.add(first)
    sequences.add(other)
    sequences.drop(other, 0)

    assert len(list(sequences.backlog())) == 0
    assert sequences.in_progress == 1


def test_a_turn_that_failed_may_be_sent_again() -> None:
    sequences = table()
    first, second, third = turn(flags="s"), turn(), turn()
    for one in (first, second, third):
        sequences.add(one)
    sequences.executed([first], 0)
    changed = sequences.failed([second], 0)
    again = turn()

    assert changed == Changed(refused=[third])
    assert sequences.add(again).ready == [again]


def test_a_start_that_failed_begins_nothing() -> None:
    sequences = table()
    first = turn(flags="s")
    sequences.add(first)
    sequences.failed([first], 0)

    assert sequences.in_progress == 0


def test_only_sequences_of_the_replica_that_lost_them_end() -> None:
    sequences = table(slots=2, replicas=2)
    turns = {id: turn(id, "s") for id in (1, 2, 3, 4)}
    for one in turns.values():
        sequences.add(one)
    waits = turn(1)
    sequences.add(waits)
    by_replica = defaultdict(set)
    for id, one in turns.items():
        by_replica[slot_of(one)[0]].add(id)
    lost = slot_of(turns[1])[0]
    other = min(by_replica[1 - lost])
    sequences.executed(list(turns.values()), 0)
    restarts = turn(min(by_replica[lost] - {1}), "s")
    sequences.add(restarts)
    changed = sequences.lost(lost, 0)

    assert changed.refused == [waits]
    with pytest.raises(SequenceNotStarted):
        sequences.add(turn(1))
    assert len(sequences.add(turn(other)).ready) == 1
    assert sequences.executed([restarts], 0) == Changed()


# # --- random operations
# ---------------------------------------------------------------------------


class Trial:
    """A table, and a model of the invariants that hold for any order of operations."""

    def __init__(self, slots: int, replicas: int) -> None:
        self.table = table(slots, replicas)
        self.seats = {Seat(replica, slot) for replica in range(replicas) for slot in range(slots)}
        self.replicas = replicas
        self.accepted: dict[int | str, list[Turn]] = defaultdict(list)
        self.executed: dict[int | str, list[Turn]] = defaultdict(list)
        self.in_flight: list[Turn] = []
        self.waiting: list[Turn] = []
        self.gone: set[int] = set()
        """`id()` of the turns that were not executed."""
        self.now = self.losses = 0

    # --- operations ---

    def add(self, id: int, flags: str) -> None:
        one = turn(id, flags)
        one.call = self.losses  # the losses that its client may know of
        try:
            changed = self.table.add(one)
        except SequenceNotStarted:
            assert not one.is_start
            return
        self.accepted[id].append(one)
        self.waiting.append(one)
        self.take(changed)

    def begin(self, count: int) -> None:
        for one in self.in_flight[:count]:
            one.is_begun = True

    def execute(self, count: int) -> None:
        turns = self.in_flight[:count]
        for one in turns:
            self.check(one)
            self.executed[one.id].append(one)
            self.in_flight.remove(one)
        self.take(self.table.executed(turns, self.now))

    def fail(self, count: int) -> None:
        self.losses += 1
        turns = self.in_flight[:count]
        for one in turns:
            self.forget(one)
        self.take(self.table.failed(turns, self.now))

    def drop(self, index: int) -> None:
        there = [one for one in self.waiting + self.in_flight if not one.is_begun]
        if there:
            self.losses += 1
            one = there[index % len(there)]
            self.forget(one)
            self.take(self.table.drop(one, self.now))

    def expire(self, _: int = 0) -> None:
        self.now += IDLE_NS
        self.take(self.table.expire(self.now))

    def lose(self, replica: int) -> None:
        self.losses += 1
        self.take(self.table.lost(replica % self.replicas, self.now))

    # # --- invariants ---

    def check(self, one: Turn) -> None:
        """A turn follows its predecessor, or one that was known to be lost when it was sent."""
        done, asked = self.executed[one.id], self.accepted[one.id]
        if not one.is_start:
            before = asked[asked.index(one) - 1]
            assert done, "it was executed before a start"
            assert not done[-1].is_end
            assert done[-1] is before or id(before) in self.gone
            assert id(before) not in self.gone or one.call > before.call, "it was not known"

    def forget(self, one: Turn) -> None:
        (self.waiting if one in self.waiting else self.in_flight).remove(one)
        self.gone.add(id(one))

    def take(self, changed: Changed) -> None:
        for one in changed.refused:
            assert not one.is_begun
            self.forget(one)
        for one in changed.ready:
            self.waiting.remove(one)
            self.in_flight.append(one)
        of = {one.id for one in self.in_flight}
        assert len(of) == len(self.in_flight), "two turns of a sequence at once"
        seats = {one.seat for one in self.in_flight}
        assert len(seats) == len(of), "two sequences in one slot"
        assert seats <= self.seats

    def finish(self) -> None:
        while self.table.in_progress:
            self.execute(len(self.in_flight))
            self.expire()
        assert not self.waiting
        assert not list(self.table.backlog())
        fresh = [turn(str(seat), "s") for seat in self.seats]
        assert all(self.table.add(one).ready for one in fresh), "a slot was not freed"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 4), st.sampled_from(["", "", "s", "e", "se"])),
            st.tuples(
                st.sampled_from(["begin", "execute", "fail", "drop", "expire", "lose"]),
                st.integers(0, 6),
            ),
        ),
        max_size=60,
    ),
    st.integers(1, 3),
    st.integers(1, 2),
)
def test_nothing_is_executed_on_another_state_than_its_sequence_has(
    operations: list[tuple[object, ...]], slots: int, replicas: int
) -> None:
    """For any order of messages, completions, failures, cancellations, losses and expiries."""
    trial = Trial(slots, replicas)
    for name, *arguments in operations:
        trial.now += 1
        getattr(trial, str(name))(*arguments)
    trial.finish()
