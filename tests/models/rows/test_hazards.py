import pytest
from support.row_hazards import HAZARDS
from support.rows import verdict_of

from xlaserve.models.rows import Independence


@pytest.mark.parametrize("name", HAZARDS)
def test_no_hazard_is_proved(name: str) -> None:
    fn, inputs, operation = HAZARDS[name]

    verdict = verdict_of(fn, inputs)

    assert verdict.independence != Independence.PROVED
    if operation is not None:
        assert (verdict.independence, verdict.operation) == (Independence.MIXED, operation)


def test_there_are_at_least_sixty() -> None:
    assert len(HAZARDS) >= 60


def test_the_line_that_mixes_rows_is_named() -> None:
    verdict = verdict_of(*HAZARDS["batch norm in training"][:2])

    assert verdict.location.startswith("row_hazards.py:")
    assert verdict.output == "y0"
