"""The state table of a model version."""

import itertools

import pytest

from xlaserve.residence.lifecycle import TRANSITIONS, Event, ForbiddenTransition, Lifecycle, State

PAIRS = list(itertools.product(State, Event))


def _in(state: State) -> Lifecycle:
    lifecycle = Lifecycle()
    lifecycle.state = state
    return lifecycle


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_an_event_moves_along_the_table_or_is_forbidden(state: State, event: Event) -> None:
    """Checked over all pairs: an event without a row in the table changes nothing."""
    lifecycle = _in(state)
    if (state, event) in TRANSITIONS:
        lifecycle.apply(event, "because")

        assert (TRANSITIONS[state, event], "because") == (lifecycle.state, lifecycle.reason)
    else:
        with pytest.raises(ForbiddenTransition):
            lifecycle.apply(event)

        assert state is lifecycle.state


def test_every_state_can_be_left() -> None:
    """There are no dead ends: a model can always be loaded again."""
    assert set(State) == {state for state, _ in TRANSITIONS}


def test_a_failed_reload_keeps_answering() -> None:
    """During a reload the old version serves; if the reload fails, it continues to serve."""
    lifecycle = _in(State.READY)
    lifecycle.apply(Event.LOAD)

    assert lifecycle.state.answers

    lifecycle.apply(Event.FAILED)

    assert State.READY is lifecycle.state


def test_the_index_knows_four_states() -> None:
    """Model repository extension, Index: a version that is reloading is READY."""
    assert {"READY", "LOADING", "UNLOADING", "UNAVAILABLE"} == {state.public for state in State}
