"""KServe's InferenceRESTClient, unmodified."""

import json
import sys
from pathlib import Path

import pytest
from support.process import run
from support.server import Serve

PROGRAM = Path(__file__).with_name("kserve_client.py")


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="kserve does not install on this Python")
async def test_the_client_of_kserve(serve: Serve, example_models: Path) -> None:
    """KServe's client parses the bodies of health responses, and fails on empty ones."""
    async with serve(example_models, load_model=("simple",), http_endpoint="port:0") as server:
        code, out, err = await run(sys.executable, str(PROGRAM), f"http://{server.http}")

    assert not code, err
    sums = [[9] * 16, [5] * 16]
    assert {
        "live": True,
        "ready": True,
        "model": True,
        "unknown": False,
        "sums, binary False": sums,
        "sums, binary True": sums,
    } == json.loads(out.splitlines()[-1])
