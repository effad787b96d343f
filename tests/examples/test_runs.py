"""Examples that consist of one command: the command of each README, run in a checkout."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LAST = {
    "ensemble_with_tokenizer": "a bad film",
    "flax_to_dashboard": "the dashboard has",
    "from_triton": "both   [[5.0, 5.0], [0.0, 3.0]]",
    "image_classifier": "seven.png shows a 7",
    "modelmesh_on_a_laptop": "150 requests, 0 wrong",
    "sagemaker_locally": "GET    /models/double           404",
    "thousand_fine_tunes": "200 of them were asked, 0 answers are wrong",
}
"""A line that each example prints once it has checked its answers."""
NEEDS = {"flax_to_dashboard": ["flax"], "from_triton": ["onnx", "tritonclient.grpc"]}
_STRICT = ("JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION")
"""Options of these tests that users do not set: the examples are run as they run them."""
_MOST_LINES = 40
_SECONDS = 240

_COMMAND = re.compile(r"^    python (examples/(\w+)/run\.py)( --stay)?$", re.M)


def test_every_example_has_a_readme_of_a_screen_with_its_command() -> None:
    found = {path.parent.name for path in EXAMPLES.glob("*/run.py")}

    assert set(LAST) == found
    for name in found:
        text = (EXAMPLES / name / "README.md").read_text()
        assert len(text.splitlines()) <= _MOST_LINES, name
        assert [name] == [match[2] for match in _COMMAND.finditer(text)]
        assert f"examples/{name}/README.md" in (ROOT / "README.md").read_text()


def test_the_index_has_one_line_for_each_directory_and_script() -> None:
    text = (EXAMPLES / "README.md").read_text()
    links = re.findall(r"^\| \[([\w.]+)\]\((\S+)\) \|", text, re.M)
    there = {path.name for path in EXAMPLES.iterdir() if path.is_dir() or path.suffix == ".py"}

    assert sorted(there - {"__pycache__"}) == sorted(name for name, _ in links)
    assert [] == [name for name, link in links if not link.startswith(name)]
    assert [] == [link for _, link in links if not (EXAMPLES / link).exists()]
    assert "(examples/README.md)" in (ROOT / "README.md").read_text()


@pytest.mark.slow
async def test_a_language_model_is_trained_in_the_given_steps(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="the README has it installed")
    version = tmp_path / "models" / "story" / "1"
    status, said = await _run(
        "examples/generation/train.py", str(tmp_path / "story"), str(version), "--steps", "2"
    )

    assert 0 == status, said
    assert ["1", "2"] == re.findall(r"^step +(\d+): loss", said, re.M)
    assert (version / "generator.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAST)
async def test_the_command_of_the_readme_ends_well(name: str) -> None:
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module, reason="the README has it installed")
    command = _COMMAND.search((EXAMPLES / name / "README.md").read_text())
    assert command
    status, said = await _run(command[1])

    assert 0 == status, said
    assert LAST[name] in said


async def _run(*words: str) -> tuple[int | None, str]:
    """Run a script in the checkout; return its status and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key not in _STRICT},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_SECONDS):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, said.decode()
