"""The board on which an engine marks the requests it has begun never unmarks one."""

from xlaserve.workers.fronts import begun
from xlaserve.workers.fronts.begun import BegunBoard


def test_an_older_request_of_the_same_word_takes_nothing_back() -> None:
    """The older request was queued while a later one was executed."""
    board = BegunBoard(BegunBoard.make())
    later = 5 + begun._WORDS
    board.begin(later)
    board.begin(5)

    assert board.has_begun(later)
    assert board.has_begun(5)
    assert not board.has_begun(later + begun._WORDS)
