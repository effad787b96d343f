"""Each MUST of RFC 9113 and RFC 7541 for a server, and the test that covers it.

The table itself is checked: every test that it names exists, and it contains every section of
`test_frame_rules.py`.
"""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent


class Must(NamedTuple):
    """A requirement and its tests."""

    section: str
    text: str
    held_by: tuple[str, ...]
    """Tests as `file::test`, and rules of test_frame_rules.py by name."""


FRAMES, PAIRS = "frame_rules::", "transitions::test_pair"
WINDOWS, SENDING = "windows::", "sending::"

MUSTS = [
    # --- RFC 9113 3.4 to 4.3 ---
    Must("3.4", "begin with SETTINGS", ("shell::test_the_server_speaks_first",)),
    Must(
        "3.4",
        "treat a wrong preface as a connection error",
        (
            FRAMES + "test_a_preface_with_one_wrong_byte_is_none",
            "settings come first",
            "an acknowledgement is not what comes first",
            "HTTP/1.1 is none",
        ),
    ),
    Must("4.1", "ignore a frame of a type that is not known", ("a type that is not known",)),
    Must("4.1", "ignore the reserved bit", ("a reserved bit is ignored",)),
    Must("4.1", "ignore flags that are not defined", ("flags that are not defined are ignored",)),
    Must("4.1", "send neither of them", ("sent_frames::test_what_we_send_is_well_formed",)),
    Must(
        "4.2",
        "take frames of 16 KB and more, as SETTINGS say, and no larger ones",
        ("DATA of the longest size", "DATA of a byte more", "what is not known, of a byte more"),
    ),
    Must(
        "4.2",
        "send none that is longer than the client takes",
        ("client_settings::test_no_frame_is_longer_than_the_client_takes",),
    ),
    Must(
        "4.3",
        "treat a block that cannot be decoded as COMPRESSION_ERROR",
        ("a block that is not HPACK", "of trailers too", "of a closed stream too"),
    ),
    Must(
        "4.3",
        "decode every block, whatever becomes of its stream",
        (FRAMES + "test_every_block_is_decoded_whatever_becomes_of_it",),
    ),
    Must(
        "4.3",
        "treat anything within a block as a connection error",
        ("no other frame within a block", "none that is not known within a block"),
    ),
    Must(
        "4.3.1",
        "begin the next block with a size update when the client's table is smaller",
        (
            "client_settings::test_the_next_block_says_that_a_smaller_table_is_smaller",
            "client_settings::test_h2_reads_our_blocks_whatever_table_it_wants",
        ),
    ),
    # --- 5: streams ---
    Must("5.1", "react to each frame in each state", (PAIRS,)),
    Must("5.1", "take nothing but HEADERS and PRIORITY on an idle stream", ("idle: DATA",)),
    Must(
        "5.1",
        "answer what comes behind END_STREAM with STREAM_CLOSED",
        ("half-closed (remote): DATA", "half-closed (remote): HEADERS"),
    ),
    Must(
        "5.1",
        "send nothing but PRIORITY on a closed stream",
        ("sent_frames::test_nothing_is_sent_on_a_closed_stream",),
    ),
    Must(
        "5.1",
        "ignore what was on its way to a stream that we have reset",
        (FRAMES + "test_what_was_on_its_way_to_a_stream_that_we_have_reset_is_ignored",),
    ),
    Must("5.1.1", "take odd ids alone, and each above the last", ("an even id",)),
    Must("5.1.1", "use no id again", ("an id below one that was used",)),
    Must(
        "5.1.2", "refuse a stream too many", ("a stream too many", "one that ended is not counted")
    ),
    Must(
        "5.2.1",
        "hold back nothing but DATA",
        (
            SENDING + "test_nothing_but_control_frames_leaves_while_the_transport_waits",
            "sent_frames::test_no_window_holds_back_anything_but_data",
        ),
    ),
    Must(
        "5.2.2", "read in time what the windows let come", ("volume::test_both_directions_at_once",)
    ),
    Must(
        "5.3.2", "do without priorities", ("PRIORITY is ignored", "priority in HEADERS is ignored")
    ),
    Must(
        "5.4.1",
        "send GOAWAY and close",
        (
            FRAMES + "test_a_connection_error_names_the_last_stream",
            FRAMES + "test_behind_a_connection_error_nothing_is_looked_at",
            "shell::test_an_error_is_told_before_the_connection_is_closed",
        ),
    ),
    Must(
        "5.4.2",
        "end a stream for its own error, and nothing else",
        (FRAMES + "test_an_error_costs_what_it_may_and_no_more",),
    ),
    Must("5.4.2", "answer no RST_STREAM with another", ("closed: RST_STREAM",)),
    Must("5.5", "ignore what is not known", ("a long one", "a value that is not known")),
    # --- 6: frames ---
    Must("6.1", "refuse DATA on stream 0", ("DATA on stream 0",)),
    Must("6.1", "refuse more padding than frame", ("more padding than frame",)),
    Must(
        "6.1",
        "count padding for the windows",
        (
            WINDOWS + "test_padding_is_no_part_of_a_message",
            WINDOWS + "test_the_window_of_the_connection_comes_back_however_messages_are_framed",
        ),
    ),
    Must("6.2", "refuse HEADERS on stream 0", ("HEADERS on stream 0",)),
    Must(
        "6.3",
        "refuse PRIORITY on stream 0, and of another length",
        ("PRIORITY on stream 0", "of 4 bytes", "of 6 bytes"),
    ),
    Must(
        "6.4",
        "refuse RST_STREAM on stream 0, on an idle stream, and of another length",
        ("RST_STREAM on stream 0", "idle: RST_STREAM", "of 3 bytes"),
    ),
    Must(
        "6.4",
        "send none on an idle stream",
        ("of 4 bytes on an idle stream (6.4)", "an idle stream that depends on itself (6.4)"),
    ),
    Must(
        "6.5",
        "refuse SETTINGS on a stream, of another length, or as an ACK with values",
        ("SETTINGS on a stream", "half a value", "an acknowledgement with values"),
    ),
    Must(
        "6.5.2",
        "refuse values that are out of bounds",
        ("ENABLE_PUSH of 2", "a wider one", "a smaller one", "a larger one"),
    ),
    Must("6.5.2", "ignore settings that are not known", ("a value that is not known",)),
    Must(
        "6.5.3",
        "apply values in their order, and acknowledge them at once",
        (
            FRAMES + "test_settings_are_acknowledged_each_time_and_in_order",
            FRAMES + "test_the_last_of_two_values_counts",
            "client_settings::test_it_is_told_behind_the_acknowledgement",
        ),
    ),
    Must(
        "6.7",
        "answer each PING with its bytes, and no answer",
        (FRAMES + "test_a_ping_is_answered_with_its_bytes_and_its_acknowledgement_is_not",),
    ),
    Must(
        "6.7",
        "refuse PING on a stream, and of another length",
        ("PING on a stream", "of 7 bytes", "of 9 bytes"),
    ),
    Must("6.8", "refuse GOAWAY on a stream", ("GOAWAY on a stream",)),
    Must(
        "6.8",
        "name no higher stream in a later GOAWAY",
        (
            FRAMES + "test_a_later_goaway_names_no_higher_stream",
            "limits::test_a_client_that_was_asked_to_go_is_told_no_later_stream",
        ),
    ),
    Must(
        "6.8",
        "keep table and window for what is ignored behind it",
        (FRAMES + "test_what_is_refused_behind_our_goaway_counts_for_the_connection",),
    ),
    Must(
        "6.9",
        "refuse an increment of 0, and another length",
        (
            "an increment of 0 on a stream",
            "an increment of 0 on the connection",
            "of 3 bytes",
            "of 5 bytes",
        ),
    ),
    Must(
        "6.9",
        "count DATA for the connection, whatever becomes of its stream",
        (WINDOWS + "test_data_for_a_stream_that_was_reset_is_charged_to_the_connection",),
    ),
    Must(
        "6.9.1",
        "send no more than either window",
        (
            SENDING + "test_an_answer_waits_for_the_window_of_its_stream",
            SENDING + "test_an_answer_waits_for_the_window_of_the_connection",
            "volume::test_long_answers_come_whole_through_small_windows",
        ),
    ),
    Must(
        "6.9.1",
        "let no window become wider than 2^31 - 1",
        ("the widest window", "wider by 1", "wider by 1 of a stream"),
    ),
    Must(
        "6.9.1",
        "refuse what is past a window",
        (
            WINDOWS + "test_past_the_window_of_the_connection_it_ends",
            WINDOWS + "test_past_the_window_of_a_stream_it_is_reset",
        ),
    ),
    Must(
        "6.9.2",
        "change the windows of open streams with the setting",
        (
            SENDING + "test_a_changed_setting_counts_for_open_streams",
            "client_settings::test_the_window_of_a_new_stream_is_that_of_the_settings_before_its_headers",
        ),
    ),
    Must(
        "6.9.2",
        "send nothing while a window is negative",
        ("sent_frames::test_nothing_leaves_while_a_window_is_negative",),
    ),
    Must(
        "6.9.2",
        "treat a window too wide through SETTINGS as a connection error",
        ("wider by 1 through SETTINGS",),
    ),
    Must(
        "6.10",
        "refuse CONTINUATION of nothing, of another stream, on stream 0",
        ("CONTINUATION of nothing", "of another stream", "on stream 0"),
    ),
    Must("7", "give codes that are not known no meaning", ("with a code that is not known (7)",)),
    # --- 8: HTTP ---
    Must("8.1", "end a message with END_STREAM", ("trailers that do not end", "trailers")),
    Must(
        "8.1.1",
        "treat a malformed request as a stream error",
        ("less than the content-length", "more than the content-length"),
    ),
    Must("8.2", "refuse names in upper case", ("a name in upper case", "in trailers")),
    Must(
        "8.2.1",
        "refuse names and values with characters that none has",
        ("a space in a name", "NUL in a value", "LF in trailers"),
    ),
    Must(
        "8.2.2",
        "refuse fields of a connection, and te but for trailers",
        ("connection", "transfer-encoding", "another te", "te of trailers"),
    ),
    Must(
        "8.3",
        "refuse pseudo-headers that are not known, of answers, behind a header, in trailers",
        (
            "one that is not known",
            "a pseudo-header of an answer",
            "one behind a header",
            "a pseudo-header in trailers",
        ),
    ),
    Must(
        "8.3.1",
        "refuse a request without each of them once",
        ("no :path", "no :method", "no :scheme", "an empty :path", "two paths"),
    ),
    Must(
        "8.4",
        "refuse a push of a client, and push nothing",
        ("PUSH_PROMISE of a client", "sent_frames::test_what_we_send_is_well_formed"),
    ),
    Must("8.5", "refuse CONNECT with :scheme and :path", ("CONNECT with :scheme and :path",)),
    Must(
        "8.7",
        "refuse with REFUSED_STREAM only what was not begun",
        (
            FRAMES + "test_a_round_trip_later_our_goaway_names_the_last_stream",
            "connection::test_no_stream_is_opened_behind_the_last_goaway",
        ),
    ),
    Must(
        "10.5",
        "limit what a client may ask for nothing",
        (
            FRAMES + "test_every_frame_that_carries_nothing_is_counted_once",
            FRAMES + "test_every_stream_that_is_reset_is_counted",
        ),
    ),
    Must(
        "10.5.1",
        "limit header blocks",
        ("a long block in many frames", "a list that is large when it is decoded"),
    ),
    # --- RFC 7541 ---
    Must(
        "RFC 7541 2.3.3",
        "refuse an index that there is not",
        ("index 0", "an index past the table", "the name of none"),
    ),
    Must(
        "RFC 7541 4.2",
        "take changes of the table's size at the beginning of a block alone",
        ("a size behind a field", "a size behind a reference", "two sizes"),
    ),
    Must(
        "RFC 7541 4.4",
        "evict before an entry is added",
        (
            "an entry larger than the table empties it",
            "dynamic_table::test_the_table_is_what_it_would_be_if_entries_had_been_made_at_once",
        ),
    ),
    Must(
        "RFC 7541 5.1",
        "refuse numbers that are too long",
        ("a number of too many octets", "zeros that say nothing"),
    ),
    Must(
        "RFC 7541 5.2",
        "refuse padding that is longer than 7 bits or no ones, and EOS",
        ("an octet of padding", "padding of zeros", "EOS", "seven bits of padding"),
    ),
    Must(
        "RFC 7541 6.2.3",
        "take a field that is never to be indexed",
        ("a field never to be indexed",),
    ),
    Must("RFC 7541 6.3", "refuse a table that is larger than ours", ("a table of 4097",)),
]
"""In the order of the sections."""


@cache
def functions(name: str) -> frozenset[str]:
    """Return the tests of a file."""
    tree = ast.parse((HERE / f"test_{name}.py").read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


@cache
def rules() -> frozenset[tuple[str, str]]:
    """Return section and name of each rule in test_frame_rules.py."""
    tree = ast.parse((HERE / "test_frame_rules.py").read_text())
    return frozenset(
        (ast.literal_eval(node.args[0]), ast.literal_eval(node.args[1]))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Rule"
    )


def missing(must: Must) -> list[str]:
    """Return the tests of a requirement that do not exist."""
    names = {name for _, name in rules()}
    return [
        test
        for test in must.held_by
        if not (
            test.partition("::")[2] in functions(test.partition("::")[0])
            if "::" in test
            else test in names
        )
    ]


@pytest.mark.parametrize("must", MUSTS, ids=lambda must: f"{must.section} {must.text}")
def test_each_rule_is_held_by_tests_that_there_are(must: Must) -> None:
    assert must.held_by
    assert [] == missing(must)


def test_the_sections_are_in_their_order() -> None:
    numbers = [
        (must.section.startswith("RFC"), *map(int, must.section.rpartition(" ")[2].split(".")))
        for must in MUSTS
    ]

    assert sorted(numbers) == numbers


def test_no_section_of_the_rules_is_left_out() -> None:
    assert {section for section, _ in rules()} <= {must.section for must in MUSTS}


def test_a_test_that_there_is_not_is_found() -> None:
    """Otherwise the checks above could not fail."""
    held = (FRAMES + "test_rule", FRAMES + "test_nothing", "an even id", "an odd id")

    assert [held[1], held[3]] == missing(Must("5.1.1", "", held))
