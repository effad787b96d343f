"""Request counts of the clients are compared with the server's; a difference names its kind."""

from collections import Counter
from pathlib import Path

import pytest

from acceptance import command, everything
from acceptance.books import COUNTERS, Books, Counts, Fate, differences, read

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "reliability.md"

METRICS = """
# HELP nv_inference_request_success Answered requests
nv_inference_request_success{model="a",version="1"} 5
nv_inference_request_success{model="a",version="2"} 2.0
nv_inference_request_failure{model="a",version="1",reason="OTHER"} 3
nv_inference_request_failure{model="a",version="1",reason="CANCELED"} 1
xlaserve_model_loads_total{model="b",version="1"} 4
xlaserve_model_ready{model="b",version="1"} 1
process_open_fds 30
"""


def test_versions_and_reasons_are_counted_together() -> None:
    expected = {("a", Fate.ANSWERED): 7, ("a", Fate.FAILED): 4, ("b", Fate.LOADED): 4}

    assert expected == read(METRICS)


def compared(own: dict[Fate, int], server: dict[Fate, int]) -> list[str]:
    """Compare the counts of one model."""
    books = Books(("a",))
    for fate, times in own.items():
        books.note("a", fate, times)
    before: Counts = Counter({("a", fate): 100 for fate in COUNTERS})
    after: Counts = Counter({("a", fate): 100 + server.get(fate, 0) for fate in COUNTERS})
    return differences({"grpc": books}, before, after)


@pytest.mark.parametrize("fate", COUNTERS)
def test_each_counter_is_compared(fate: Fate) -> None:
    assert [] == compared({fate: 3}, {fate: 3})
    for count in (2, 4):
        expected = [f"grpc: a: {count} {fate}, its clients counted 3"]

        assert expected == [
            text for text in compared({fate: 3}, {fate: count}) if "requests" not in text
        ]


@pytest.mark.parametrize(
    ("answered", "failed", "differs"),
    [
        *((3, 0, False), (5, 0, False), (3, 2, False), (4, 1, False)),
        *((2, 0, True), (6, 0, True), (5, 2, True), (4, 2, True)),
    ],
)
def test_what_a_client_is_unsure_of_may_be_either_once(
    answered: int, failed: int, *, differs: bool
) -> None:
    found = compared(
        {Fate.ANSWERED: 3, Fate.UNSURE: 2}, {Fate.ANSWERED: answered, Fate.FAILED: failed}
    )

    assert differs is bool(found)


def test_an_answer_that_changes_is_wrong() -> None:
    books = Books(())
    books.same("one and one", 2)
    books.same("one and one", 2)

    assert [] == books.wrong
    books.same("one and one", 3)
    assert ["one and one was 2, then 3"] == books.wrong


# # --- kinds of differences ----------------------------------------------------------------------


def test_no_two_kinds_ask_the_same_model() -> None:
    models = [model for kind in everything.KINDS for model in kind.models]

    assert sorted(set(models)) == sorted(models)
    assert sorted(set(everything.NAMES)) == sorted(everything.NAMES)


def test_the_page_names_every_kind() -> None:
    rows = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("- `")]

    assert [*everything.NAMES] == rows


def test_a_kind_that_there_is_not_cannot_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["soak", "--rows", "M4", "--without", "grpc,nobody"])

    assert "there is no kind of client nobody" in capsys.readouterr().err
