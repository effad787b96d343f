"""Code that changes under a running server breaks nothing that the server does later."""

from pathlib import Path

import pytest

from acceptance import replaced_code


@pytest.mark.parametrize("processes", [1, 2])
def test_every_kind_of_process_is_started_with_the_servers_code(
    processes: int, tmp_path: Path
) -> None:
    outcome = replaced_code.go_on(tmp_path, processes=processes)

    assert [] == [str(figure) for figure in outcome.figures if not figure.holds]
