"""Foreign clients that are programs of their own."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

GRPCURL = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3"
BUILD_SECONDS = 300


@pytest.fixture(scope="session")
def grpcurl(pytestconfig: pytest.Config) -> str:
    """The path of grpcurl: installed, or built once where Go is present; else a skip."""
    installed = shutil.which("grpcurl")
    if installed:
        return installed
    go = shutil.which("go")
    if go is None:
        pytest.skip("neither grpcurl nor Go is installed")
    # Of this process: others may build at the same moment.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    folder = Path(pytestconfig.cache.mkdir(f"go-tools-{worker}"))
    program = folder / "grpcurl"
    if not program.exists():
        built = subprocess.run(
            [go, "install", GRPCURL],
            env=os.environ | {"GOBIN": str(folder)},
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            check=False,
        )
        if built.returncode:
            pytest.skip(f"grpcurl cannot be built: {built.stderr.strip().splitlines()[-1]}")
    return str(program)
