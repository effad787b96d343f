"""What tox.ini cannot say: which Pythons are there, and that none is passed over in silence."""

import logging
import os
import subprocess
import sys
import time

from tox.config.loader.memory import MemoryLoader
from tox.config.loader.str_convert import StrConvert
from tox.config.sets import ConfigSet
from tox.config.types import EnvList
from tox.plugin import impl
from tox.report import HandledError
from tox.session.state import State

PYTHONS = ("3.11", "3.12", "3.13")
WHOLE = "tests"
"""The environment that runs the whole suite, on the Python that tox runs on."""
SMOKE = "smoke-py"
"""How the environments begin that run a part of it on the others."""


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Drop the smoke suites of this Python and of those that are not there from a default run.

    tox's own way, `skip_missing_interpreters`, would also skip the environments that were asked
    for, and end with success where no test ran at all.
    """
    # One run for tests/support/unsteady.py, over all environments, unless .ci/run is one.
    os.environ.setdefault("UNSTEADY_RUN", f"tox-{os.getpid()}-{time.time_ns()}")
    # `tox list` has neither option.
    asked = getattr(state.conf.options, "env", None)
    labels = getattr(state.conf.options, "labels", None)
    default = (asked is None or asked.is_default_list) and not labels
    running = ".".join(map(str, sys.version_info[:2]))
    if default or (asked is not None and WHOLE in asked):
        check_python(running)
    written = StrConvert.to_env_list(core_conf.loaders[0].load_raw("env_list", None, None)).envs
    there = {version for version in PYTHONS if version != running and _is_there(version)}
    left_out = {_smoke(version) for version in PYTHONS if version not in there}
    core_conf.loaders.insert(
        0, MemoryLoader(env_list=EnvList([name for name in written if name not in left_out]))
    )
    if default:
        for version in sorted({*PYTHONS} - there - {running}):
            logging.warning("no smoke suite on Python %s: python%s is not there", version, version)


def check_python(running: str) -> None:
    """Refuse to run the whole suite on a Python that the package does not support."""
    if running not in PYTHONS:
        raise HandledError(
            f"xlaserve runs on Python {', '.join(PYTHONS)}, and tox runs on {running}: "
            "install tox on one of those, or name an environment (tox run -e py312)"
        )


def _smoke(version: str) -> str:
    return SMOKE + version.replace(".", "")


def _is_there(version: str) -> bool:
    # A shim of pyenv is on the path also where it has no Python behind it.
    try:
        ended = subprocess.run([f"python{version}", "-c", ""], capture_output=True, check=False)
    except OSError:
        return False
    return not ended.returncode
