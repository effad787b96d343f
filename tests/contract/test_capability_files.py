"""`cc_model_filenames`: the file of a model for the compute capability of its devices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from support import asking
from support.python_models import VECTORS, write
from support.server import Serve

from xlaserve.runtime.devices import sites
from xlaserve.runtime.devices.placement import Devices

CODE = """
class Model(PythonModel):
    def infer(self, inputs):
        return {"y": inputs["x"] * FACTOR}
"""
FILES = 'cc_model_filenames { key: "9.0" value: "hopper.py" }'


@pytest.mark.parametrize(("capability", "expected"), [("9.0", 3), ("8.0", 2), ("", 2)])
async def test_the_file_of_the_capability_is_loaded(
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: str,
    expected: int,
) -> None:
    """Any other device has the usual one, and the log says so where there is no capability."""
    beside = {"hopper.py": "from xlaserve import PythonModel\n" + CODE.replace("FACTOR", "3")}
    write(tmp_path, "m", CODE.replace("FACTOR", "2"), VECTORS + FILES, beside)
    if capability:
        played = Devices("cpu", 1, capabilities=(capability,))
        monkeypatch.setattr(sites, "devices", lambda platform: played)
    settings: dict[str, Any] = {"load_model": ("m",), "allow_python_models": True}
    with capture_logs() as lines:
        async with serve(tmp_path, **settings) as server, asking.client(server) as client:
            found = await client.infer("m", x=np.ones(2, np.float32))

    named = [line["fields"] for line in lines if "without effect" in line["event"]]
    assert [expected] * 2 == found["y"].tolist()
    assert [["cc_model_filenames"]] == named
