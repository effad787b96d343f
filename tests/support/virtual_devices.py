"""Runs scripts in new processes, because JAX fixes the number of CPU devices at start."""

import os
import subprocess
import sys
from pathlib import Path


def run_on_devices(script: Path, directory: Path, count: int) -> str:
    """Run a script, giving it a directory and a device count; return its stdout."""
    ran = subprocess.run(
        [sys.executable, str(script), str(directory), str(count)],
        env=os.environ
        | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout
