"""The board of the workers, in memory that all of them share."""

import os

from xlaserve.workers.offload.board import WorkerBoard


def test_what_one_worker_writes_the_others_read() -> None:
    """Each uses its own words, and its own file descriptor."""
    made = WorkerBoard.create(3)
    other = WorkerBoard(os.dup(made.descriptor), 3)
    other.say_idle(2, True)
    other.begin(2, 0, 7)
    other.begin(2, 1, 8)

    assert [False, False, True] == [made.is_idle(worker) for worker in range(3)]
    assert [[0, 0, 0], [0, 0, 0], [7, 8, 0]] == [
        [made.begun(worker, owner) for owner in range(3)] for worker in range(3)
    ]


def test_a_worker_that_died_is_not_idle() -> None:
    """The parent marks it; the numbers of its started batches remain."""
    board = WorkerBoard.create(2)
    board.say_idle(1, True)
    board.begin(1, 0, 3)
    board.say_idle(1, False)

    assert (False, 3) == (board.is_idle(1), board.begun(1, 0))
