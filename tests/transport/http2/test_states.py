"""The table of stream states (RFC 9113, 5.1), over every pair of state and input."""

import pytest

from xlaserve.grpc.http2.states import NEXT, REACTION_CODES, TRANSITIONS, Input, Reaction, State

RECEIVED = [i for i in Input if i <= Input.RST_STREAM]
OVER = {State.CLOSED, State.RESET}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("happening", Input)
def test_the_quick_table_says_what_the_readable_one_says(state: State, happening: Input) -> None:
    expected = TRANSITIONS[state].get(happening, Reaction.FAULT)

    assert expected is NEXT[state][happening]


@pytest.mark.parametrize("happening", Input)
def test_nothing_opens_a_stream_again(happening: Input) -> None:
    for state in OVER:
        assert not isinstance(NEXT[state][happening], State)


@pytest.mark.parametrize("happening", RECEIVED)
def test_what_was_on_its_way_to_a_stream_that_we_reset_is_ignored(happening: Input) -> None:
    assert NEXT[State.RESET][happening] is Reaction.IGNORE


def test_an_idle_stream_takes_headers_only() -> None:
    accepted = [i for i in RECEIVED if isinstance(NEXT[State.IDLE][i], State)]

    assert [Input.HEADERS, Input.HEADERS_END] == accepted


def test_what_a_client_sends_after_its_end_is_a_stream_error() -> None:
    sent = (Input.HEADERS, Input.HEADERS_END, Input.DATA, Input.DATA_END)
    reactions = {NEXT[State.HALF_CLOSED_REMOTE][i] for i in sent}

    assert {Reaction.STREAM_CLOSED} == reactions


@pytest.mark.parametrize("state", [State.OPEN, State.HALF_CLOSED_REMOTE])
def test_a_reset_ends_every_open_stream(state: State) -> None:
    assert NEXT[state][Input.RST_STREAM] is State.CLOSED
    assert NEXT[state][Input.SEND_RST] is State.RESET


def test_every_reaction_to_a_client_but_silence_has_its_code() -> None:
    assert set(Reaction) - {Reaction.IGNORE, Reaction.FAULT} == set(REACTION_CODES)
