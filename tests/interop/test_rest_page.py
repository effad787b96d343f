"""The examples in docs/rest.md, run as a reader would run them."""

import re
import shlex
from pathlib import Path

import pytest
from support.curl import curl
from support.process import served

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rest.md"


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


@pytest.mark.slow
async def test_every_example_is_answered(example_models: Path, programs: str) -> None:
    flags = ("--model-control-mode", "explicit", "--load-model", "*")
    roots = ("--model-root", str(example_models))
    async with served(example_models, *flags, *roots, programs=programs) as server:
        for arguments in commands():
            here = [
                argument.replace("localhost:8000", server.http).replace(
                    "/opt/ml/models/two", str(example_models / "identity")
                )
                for argument in arguments
            ]

            assert 200 == (await curl(*here)).status, arguments
