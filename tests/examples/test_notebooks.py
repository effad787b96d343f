"""The notebooks, unmodified, run from their own folder in a Jupyter kernel."""

from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

import nbformat

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SAID = {"first_model.ipynb": ["version 1: ", "version 2: ", "http://127.0.0.1:", "READY"]}
"""Texts that the outputs of each notebook contain, in this order."""
_SECONDS = 240


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_valid_and_has_no_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)

    assert not [cell for cell in notebook.cells if cell.get("outputs")]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
async def test_a_notebook_runs_to_its_end(name: str) -> None:
    notebook = read(FOLDER / name)
    client = nbclient.NotebookClient(
        notebook, timeout=_SECONDS, resources={"metadata": {"path": str(FOLDER)}}
    )
    await client.async_execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    said = "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs
    )

    rest = said
    for text in SAID[name]:
        _, found, rest = rest.partition(text)
        assert found, said


def test_every_notebook_is_run() -> None:
    assert set(SAID) == {path.name for path in NOTEBOOKS}
