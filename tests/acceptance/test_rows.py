"""The acceptance rows at sizes of a few seconds each.

The full sizes are `tox run -e soak`, `flood`, `fuzz` and `chaos`.
"""

from pathlib import Path

import pytest

from acceptance.rows import ROWS, Row, Size

pytestmark = pytest.mark.slow

SHORT = [row for row in ROWS if Size.SHORT in row.sizes]


# boofuzz imports a name that newer Pythons lack.
@pytest.mark.filterwarnings("ignore:'collections.abc.ByteString':DeprecationWarning")
@pytest.mark.parametrize("row", [row for row in SHORT if row.id != "F1"], ids=lambda row: row.id)
def test_a_row_holds(row: Row, tmp_path: Path) -> None:
    """F1 is omitted: its tests are already part of the suite."""
    outcome = row.run(tmp_path, Size.SHORT)
    for figure in outcome.figures:
        print(figure)

    assert [] == outcome.failing
    assert outcome.holds
