"""V7: the server's own code is replaced on disk while it serves, as `pip install` does."""

import os
import shutil
import signal
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

import psutil

import xlaserve
import xlaserve_proto
from acceptance.children import KINDS, write_subjects
from acceptance.figures import Outcome
from acceptance.stage import Stage, served, until

_BROKEN = 'raise ImportError("this file is of another version")\n'
FOLDERS = ("server", "generated")
PAGES = (
    "/",
    "/metrics",
    "/v2",
    "/v2/docs",
    "/v2/docs/openapi.json",
    "/v2/docs/protos.zip",
    "/v2/health/ready",
    "/v2/models/who",
    "/v2/models/who/config",
    "/v2/models/stats",
)


def go_on(folder: Path, *, processes: int = 1) -> Outcome:
    """Replace the code, end every child process, then have a child of each kind work."""
    outcome, code = Outcome(), folder / "code"
    packages = [Path(one.__path__[0]) for one in (xlaserve, xlaserve_proto)]
    for root, package in zip(FOLDERS, packages, strict=True):
        # With the times of the files, so that cached bytecode is valid.
        shutil.copytree(package, code / root / package.name)
    protos = packages[0].parents[1] / "protos"
    if protos.exists():  # a checkout; a wheel has them in the package
        shutil.copytree(protos, code / "protos")
    flags = write_subjects(folder) | {"processes": processes}
    path = os.pathsep.join([str(code / name) for name in FOLDERS])
    with served(folder, flags, has_watchdog=False, variables={"PYTHONPATH": path}) as stage:
        _replace(code)
        outcome.none("children left", _end_children(stage))
        for place, (name, kind) in enumerate(KINDS.items()):
            try:
                kind.work(stage, place)
            except (OSError, HTTPException) as error:
                outcome.none(f"failures of a {name}", [str(error)])
            else:
                outcome.none(f"failures of a {name}", [])
        for page in PAGES:
            outcome.none(f"failures of {page}", _failures(stage, page))
        said = stage.launch.log.read_text()
        outcome.none("lines of the log that name the other version", _lines(said, _BROKEN[19:40]))
    return outcome


def _replace(code: Path) -> None:
    for file in [*code.rglob("*.py")]:
        file.write_text(_BROKEN)
    for folder in [*code.rglob("__pycache__")]:
        shutil.rmtree(folder)


def _end_children(stage: Stage) -> list[str]:
    """Kill all child processes, and wait until the server has replaced those that it needs."""
    assert stage.launch.process is not None
    children = psutil.Process(stage.launch.process.pid).children(recursive=True)
    for one in children:
        with suppress(psutil.Error):
            one.send_signal(signal.SIGKILL)
    psutil.wait_procs(children, timeout=60)
    until(lambda: not _failures(stage, "/v2/health/ready"))
    until(lambda: not _failures(stage, "/v2/models/spawned/ready"))
    return [str(one) for one in children if one.is_running() and one.status() != "zombie"]


def _failures(stage: Stage, page: str) -> list[str]:
    connection = stage.connect()
    try:
        connection.request("GET", page)
        answer = connection.getresponse()
        said = answer.read()
    except (OSError, HTTPException) as error:
        return [repr(error)]
    finally:
        connection.close()
    return [] if answer.status == 200 else [f"{answer.status} {said[:200]!r}"]


def _lines(text: str, piece: str) -> list[str]:
    return [line for line in text.splitlines() if piece in line]
