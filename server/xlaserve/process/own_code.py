"""Keeps the code of a server's start, so that upgrades cannot break its later work.

`pip install` replaces the files of this package under a running server. From `keep` on, modules
that the server imports late and processes that it starts come from an archive in memory instead:
all of them have the code of the server's start until a successor takes over (SIGUSR2). Other
packages are not in the archive.
"""

import fcntl
import os
import re
import struct
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import util
from pathlib import Path

import structlog

from xlaserve import build

_PACKAGES = ("xlaserve", "xlaserve_proto")
_FOLDER = "/proc/self/fd"
_ARCHIVE = re.compile(rf"{_FOLDER}/(\d+)/")
_MAIN = f"""
import os, sys
from runpy import run_module
os.set_inheritable(int(sys.path[0].removeprefix("{_FOLDER}/")), False)
run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
"""Program of the archive: runs the module that the first argument names."""
_SOURCES = "sources/"
"""Folder of the archive with the modules that `sources` returns: a hash of them names what they
have converted."""
_PROTOS = ("protos", "xlaserve/http/dashboard/protos")
"""Folder of a checkout, and its place in a wheel: see `force-include` in pyproject.toml."""
_READ = ("artifact", "authoring", "importers")
_SOURCE, _BYTECODE = ".py", ".pyc"
_HEADER = struct.Struct("<4sIII")
"""Header of a file of bytecode: magic number, flags, time and size of its source."""

_log = structlog.get_logger("own_code")


def keep() -> None:
    """Keep the code of this process, which must be the server's first or one that runs kept code.

    Without memfd_create and /proc, code is read from disk, and the log says so.
    """
    if kept() is not None:
        return
    if not hasattr(os, "memfd_create"):
        _log.info("code not kept: restart after an upgrade", reason="no memfd_create")
        return
    try:
        archive = f"{_FOLDER}/{_archived()}"
    except OSError as error:
        _log.warning("code not kept: restart after an upgrade", reason=str(error))
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES and hasattr(module, "__path__"):
            module.__path__ = [f"{archive}/{name.replace('.', '/')}"]


def _archived() -> int:
    """Return the descriptor of a new archive of the code on disk; raises OSError."""
    descriptor = os.memfd_create("xlaserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # Constants of Linux alone.
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file, zipfile.ZipFile(file, "w") as written:
            _write(written)
        # A model's code has the descriptor in its process, and may not change what others run.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def kept() -> int | None:
    """Return the descriptor of the archive, or None if this process has its code from disk."""
    found = _ARCHIVE.match(f"{sys.modules['xlaserve'].__path__[0]}/")
    return None if found is None else int(found[1])


def command(given: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return a command that runs a module of ours from the archive, and the descriptor it needs.

    Any other command is returned as it was.
    """
    words, descriptor = list(given), kept()
    if descriptor is not None and "-m" in words:
        at = words.index("-m")
        if words[at + 1].partition(".")[0] in _PACKAGES:
            # Python runs a zip file, and puts it first in sys.path even with -P.
            words[at] = f"{_FOLDER}/{descriptor}"
            return words, [descriptor]
    return words, []


def sources(names: Iterable[str]) -> list[bytes]:
    """Return the sources of modules of ours, such as `artifact/weights.py`; raises OSError.

    The name of a folder, such as `importers/onnx`, stands for all modules in it, sorted.
    """
    descriptor = kept()
    if descriptor is None:
        root = _folder("xlaserve")
        every = [file.relative_to(root).as_posix() for file in root.rglob("*.py")]
        return [(root / name).read_bytes() for name in _named(names, every)]
    with zipfile.ZipFile(f"{_FOLDER}/{descriptor}") as archive:
        every = [name.removeprefix(_SOURCES) for name in archive.namelist()]
        return [archive.read(f"{_SOURCES}{name}") for name in _named(names, every)]


def _named(names: Iterable[str], every: Sequence[str]) -> Iterator[str]:
    for name in names:
        found = sorted(one for one in every if f"{one}/".startswith(f"{name}/"))
        if not found:
            raise FileNotFoundError(name)
        yield from found


def _write(archive: zipfile.ZipFile) -> None:
    archive.writestr("__main__.py", _MAIN)
    for package in _PACKAGES:
        root = _folder(package)
        for path in _files(root):
            name = path.relative_to(root).as_posix()
            bytecode = _bytecode(path) if path.suffix == _SOURCE else None
            if bytecode is None:
                archive.writestr(f"{package}/{name}", path.read_bytes())
            else:
                # Without its source in the archive, zipimport does not compare their times.
                archive.writestr(f"{package}/{name}c", bytecode)
            if path.suffix == _SOURCE and name.partition("/")[0] in _READ:
                archive.writestr(f"{_SOURCES}{name}", path.read_bytes())
    folder, place = _PROTOS
    for path in (_folder("xlaserve").parents[1] / folder).glob("*.proto"):
        archive.writestr(f"{place}/{path.name}", path.read_bytes())
    archive.writestr(f"xlaserve/{build.KEPT_FILE}", build.kept_text())


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(folder, name) for name in names if not name.endswith(_BYTECODE))


def _bytecode(path: Path) -> bytes | None:
    """Return the bytecode that the interpreter has cached, if it matches the source."""
    with suppress(OSError, NotImplementedError, struct.error):
        data = Path(util.cache_from_source(str(path))).read_bytes()
        found = path.stat()
        expected = (util.MAGIC_NUMBER, 0, int(found.st_mtime), found.st_size & 0xFFFFFFFF)
        if _HEADER.unpack_from(data) == expected:
            return data
    return None


def _folder(package: str) -> Path:
    spec = util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))
