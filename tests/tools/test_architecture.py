"""The architecture page matches the code."""

from pathlib import Path

import pytest

import draw_architecture
from architecture import lives, told, workers
from architecture.lives import Life, Step
from architecture.rooms import Room, arrows, rooms
from architecture.workers import Worker
from draw_architecture import SERVER


@pytest.mark.slow
def test_everything_on_the_page_is_in_the_code() -> None:
    assert [] == draw_architecture.problems()


@pytest.mark.slow
def test_the_page_is_fresh() -> None:
    assert draw_architecture.PAGE.read_text() == draw_architecture.page()


@pytest.mark.parametrize(
    "name", ["core/no_such.py", "serving/gates.py: Gates.no_such", "serving/gates.py: X"]
)
def test_a_step_that_is_not_there_is_named(name: str) -> None:
    life = Life("a request", (Step("serving/gates.py: Gates.admit", ""), Step(name, "")))

    assert [f"'a request' names {name}, which does not exist"] == lives.missing((life,), SERVER)


def test_a_thread_without_a_row_and_a_row_without_a_thread_are_named(tmp_path: Path) -> None:
    package = tmp_path / "xlaserve"
    package.mkdir()
    package.joinpath("new.py").write_text(
        "import threading\n\n\nclass A:\n    def b(self):\n        threading.Thread()\n"
    )
    row = Worker("gone.py: start", "", "", "", "")

    assert [
        "new.py: A.b starts a thread or a process but has no row",
        "gone.py: start has a row but starts nothing",
    ] == workers.unmatched(set(workers.places(tmp_path)), (row,))


def test_an_arrow_that_follows_from_others_is_left_out(tmp_path: Path) -> None:
    for name, text in (
        ("app", "from xlaserve.serving import a\nfrom xlaserve.concurrency import b\n"),
        ("serving/a", "import xlaserve.concurrency.b\n"),
        ("concurrency/b", ""),
    ):
        file = tmp_path / "xlaserve" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    assert [
        ("xlaserve.app", "xlaserve.serving"),
        ("xlaserve.serving", "xlaserve.concurrency"),
    ] == list(arrows(rooms(tmp_path)))


def test_every_row_says_all_that_it_should() -> None:
    assert all(row.name and row.does and row.touches and row.hands_over for row in told.WORKERS)


def test_arrows_of_rooms_in_a_circle_do_not_follow_from_one_another() -> None:
    """The result does not depend on the order of sets: an outsider keeps its arrows to both."""
    names = ["xlaserve.a", "xlaserve.b", "xlaserve.c", "xlaserve.d"]
    a, b, c, d = (Room(name) for name in names)
    a.imports |= {"xlaserve.b", "xlaserve.c", "xlaserve.d"}
    b.imports |= {"xlaserve.c", "xlaserve.d"}
    c.imports |= {"xlaserve.b"}

    assert [
        ("xlaserve.a", "xlaserve.b"),
        ("xlaserve.a", "xlaserve.c"),
        ("xlaserve.b", "xlaserve.c"),
        ("xlaserve.b", "xlaserve.d"),
        ("xlaserve.c", "xlaserve.b"),
    ] == list(arrows([a, b, c, d]))
