"""Programs for GPUs and TPUs use the host only for their inputs and outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.targets import export_sharded

from xlaserve.offline.targets import environment

SCRIPT = Path(__file__).with_name("compiled_hlo.py")
COUNT = 4


def test_programs_do_nothing_with_the_host(
    platform: Any, tmp_path: Path, example_models: Path
) -> None:
    """Both whole and spread over four devices, which only communicate among themselves.

    As controls, a callback and a result left in host memory are detected.
    """
    target = platform.target
    paths = [*export_sharded(tmp_path, COUNT).values()]
    if platform.name == "cuda":
        paths += [example_models / "digits" / "1", example_models / "mlp" / "1"]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), target.name, str(COUNT), *map(str, paths)],
        env={
            **environment.of(target, COUNT),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    programs = found["programs"]

    assert found["control"]
    assert [] == [line for one in programs for line in one["traffic"]]
    assert {False} == {one["donates"] for one in programs}
    assert all(one["characters"] for one in programs)
    assert {path.parent.name for path in paths} == {one["model"] for one in programs}
    assert all(one["collectives"] for one in programs if one["model"] == "sharded")
    assert not any(one["collectives"] for one in programs if one["devices"] == 1)
