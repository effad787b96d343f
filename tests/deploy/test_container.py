"""A container of the manifests without a cluster: its command as user 1000, on a read-only root."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.images import ROOT
from support.tools import missing, program

import kubernetes_manifests

# Starts a server, and needs namespaces that not every machine permits.
pytestmark = pytest.mark.large

SUPPORT = ROOT / "tests" / "support"
LIMIT_SECONDS = 280


@pytest.fixture(scope="module")
def container() -> Any:
    """The container of the manifests, as kubectl applies them."""
    manifests = yaml.safe_load_all(kubernetes_manifests.FILE.read_text())
    (found,) = (one for one in manifests if one["kind"] == "Deployment")
    return found["spec"]["template"]["spec"]["containers"][0]


def in_pod(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a pod would; it fails if the system permits no namespaces."""
    script = SUPPORT / "read_only_root.sh"
    return subprocess.run(
        [program("sh"), script, folder, ROOT / "examples" / "models", *command],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
        env={**os.environ, "XLASERVE_COMPILE_PROCESSES": "0"},
    )


def test_the_command_serves_as_user_1000_on_a_read_only_root(
    tmp_path: Path, container: Any
) -> None:
    if in_pod(tmp_path, "true").returncode:
        missing("the system lets nobody make namespaces of users and mounts")
    arguments = [*container["args"], *("--model-control-mode", "explicit")]
    arguments += ["--load-model", "identity"]
    probe = SUPPORT / "in_container.py"
    done = in_pod(tmp_path, sys.executable, "-P", str(probe), json.dumps(arguments))
    assert 0 == done.returncode, done.stderr
    told = json.loads(done.stdout)

    assert 1000 == told["user"]
    assert ["/cache", "/scratch", "/tmp"] == told["writable"]
    assert [200, 200, 200] == told["probes"]
    assert [[1.0] * 16] == told["answer"], told["log"]
    assert {".json", ".xla"} == set(told["kept"]), "compiled programs are kept for the next start"
    assert 0 == told["status"], "it drains and ends by itself"
    assert [] == [line for line in told["log"] if line["level"] in {"error", "critical"}]
