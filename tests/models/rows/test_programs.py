"""Random programs: every proof is confirmed by execution."""

import pytest
from support.row_programs import INPUTS, Program
from support.row_trial import leak
from support.rows import exported

from xlaserve.row_proofs import Independence, prove

DEFAULT = range(25)
LARGE = range(1000, 3000)


def _is_proved_and_holds(seed: int) -> bool:
    """Tell whether a program is proved; fails if execution contradicts the proof."""
    program = Program(seed)
    artifact = exported(program, INPUTS)
    verdict = prove(artifact, 0, [f"y{number}" for number in range(len(artifact.out_avals))])
    if verdict.independence != Independence.PROVED:
        return False

    seen = leak(artifact, seed)

    assert not seen, f"program {seed}: {seen}; its steps are {program.taken}"
    return True


@pytest.mark.slow  # it compiles hundreds of programs
def test_what_is_proved_of_a_random_program_holds() -> None:
    proved = sum(map(_is_proved_and_holds, DEFAULT))

    assert 5 <= proved <= len(DEFAULT) - 5


@pytest.mark.large
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", LARGE[::100])
def test_what_is_proved_of_a_hundred_random_programs_holds(first: int) -> None:
    proved = sum(map(_is_proved_and_holds, range(first, first + 100)))

    assert 20 <= proved <= 80
