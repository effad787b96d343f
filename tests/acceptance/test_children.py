"""Every kind of child process is stopped or killed during its work, and nothing else fails."""

from pathlib import Path

import pytest

from acceptance import children

CASES = [(kind, number) for kind in children.KINDS for number in children.SIGNALS]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), CASES)
def test_a_child_is_replaced_and_nothing_is_left(kind: str, number: str, tmp_path: Path) -> None:
    """Another child takes over; a request being executed by a Python model gets INTERNAL."""
    outcome = children.end_each(tmp_path, count=1, kinds=(kind,), signals=(number,), timed=False)

    assert [] == [str(figure) for figure in outcome.figures if not figure.holds]
