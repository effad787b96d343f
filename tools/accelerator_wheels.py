"""Install the wheels that compile for a platform, in the version of the installed JAX.

    python tools/accelerator_wheels.py cuda12|tpu

If they are not available it says why, and checks that need them are skipped. If REQUIRE_TOOLS is
set, as in CI, it fails.
"""

import argparse
import os
import shutil
import subprocess
import sys
from importlib import metadata

import locks

EXTRAS = ("cuda12", "tpu")
_SHOWN_LINES = 3
_FALSE = ("", "0", "false", "no")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("extra", choices=EXTRAS)
    wanted = f"jax[{parser.parse_args().extra}]=={metadata.version('jax')}"
    installer = shutil.which("uv")
    command = [installer, "pip"] if installer else [sys.executable, "-m", "pip"]
    target = ["--python", sys.executable] if installer else []
    ended = subprocess.run(
        [*command, "install", *target, *_constraints(), wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        reason = "\n".join(ended.stderr.strip().splitlines()[-_SHOWN_LINES:])
        print(f"{wanted} cannot be had, and what wants it is skipped:\n{reason}")
        return int(os.environ.get("REQUIRE_TOOLS", "").lower() not in _FALSE)
    return 0


def _constraints() -> list[str]:
    path = locks.lock_file(".".join(map(str, sys.version_info[:2])))
    return [f"--constraint={path}"] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
