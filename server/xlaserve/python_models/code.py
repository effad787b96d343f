"""Imports the modules of one model, isolated from those of other models.

They form a package with a unique name. `import helper` in one of them looks in the version
directory first, as it does in a script; two models may have different modules of the same name. No
`__pycache__` is written, so the contents of the version directory do not change.
"""

import builtins
import importlib
import importlib.util
import itertools
import os
import stat
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots

FILE_NAME = "model.py"
"""The file that makes a version directory a Python model."""

LIMIT_BYTES = 16 << 20
"""Maximum size of one module."""

_PREFIX = "xlaserve_model_"
_NUMBERS = itertools.count(1)
_INIT = "__init__.py"

_importing = threading.RLock()
"""Held while a model's modules are added to or removed from `sys.modules` and `sys.meta_path`."""


class ModelCode:
    """The package of one version directory."""

    def __init__(
        self,
        directory: Path,
        roots: Roots = ANYWHERE,
        file_name: str = FILE_NAME,
    ) -> None:
        self.directory = directory
        self._file_name = file_name
        self.package = f"{_PREFIX}{next(_NUMBERS)}"
        self._roots = roots
        self._offered: dict[str, ModuleType] = {}
        self._finder = _Finder(self)

    def offer(self, name: str, module: ModuleType) -> None:
        """Make `import name` in the model's code return this module, ahead of all others."""
        self._offered[name] = module

    def load(self) -> ModuleType:
        """Execute model.py and return its module. Exceptions of the code propagate."""
        _check_writers(self.directory)
        package = ModuleType(self.package)
        package.__path__ = []
        with _importing:
            sys.meta_path.insert(0, self._finder)
            sys.modules[self.package] = package
        return importlib.import_module(f"{self.package}.{Path(self._file_name).stem}")

    def close(self) -> None:
        """Remove the package's modules from `sys.modules`; running code keeps its references."""
        with _importing:
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            inside = f"{self.package}."
            for name in [n for n in sys.modules if n == self.package or n.startswith(inside)]:
                del sys.modules[name]

    def find(self, parts: Sequence[str]) -> tuple[Path, bool] | None:
        """Return the file of a module in the version directory, and whether it is a package."""
        if not all(part.isidentifier() for part in parts):
            return None
        place = self.directory.joinpath(*parts)
        for path, is_package in ((place / _INIT, True), (place.with_suffix(".py"), False)):
            if path.is_file():
                return path, is_package
        return None

    def source(self, path: Path) -> bytes:
        """Read a module; raises InvalidModel if it is outside the roots or world-writable."""
        limit, roots = LIMIT_BYTES, self._roots
        with files.opened(path.parent, path.name, limit_bytes=limit, roots=roots) as (file, size):
            # Check the opened file, not the path: the path may point elsewhere by now.
            _check_mode(path.name, os.fstat(file.fileno()).st_mode)
            return bytes(files.read_exactly(file, size, path.name))

    def builtins(self) -> dict[str, object]:
        """Return builtins whose `__import__` searches the version directory first."""
        return {**vars(builtins), "__import__": self._import}

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        head = name.partition(".")[0]
        if level == 0 and head in self._offered:
            return self._offered[head]
        if level or self.find([head]) is None:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        found = builtins.__import__(f"{self.package}.{name}", None, None, fromlist or ("",), 0)
        return found if fromlist else sys.modules[f"{self.package}.{head}"]


class _Finder(MetaPathFinder):
    """Finds the modules of one model's package."""

    def __init__(self, code: ModelCode) -> None:
        self._code = code

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inner = fullname.partition(".")
        if package != self._code.package or not inner:
            return None
        found = self._code.find(inner.split("."))
        if found is None:
            return None
        file, is_package = found
        return importlib.util.spec_from_file_location(
            fullname,
            file,
            loader=_Loader(self._code, file),
            submodule_search_locations=[] if is_package else None,
        )


class _Loader(Loader):
    """Reads a module within the repository roots, and executes it."""

    def __init__(self, code: ModelCode, file: Path) -> None:
        self._code = code
        self._file = file

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        source = self._code.source(self._file)
        module.__dict__["__builtins__"] = self._code.builtins()
        compiled: CodeType = compile(source, str(self._file), "exec", dont_inherit=True)
        exec(compiled, module.__dict__)


def _check_writers(directory: Path) -> None:
    try:
        mode = directory.stat().st_mode
    except OSError as error:
        raise InvalidModel(f"its directory cannot be read: {error.strerror}") from error
    if not mode & stat.S_ISVTX:
        _check_mode(f"directory '{directory.name}'", mode)


def _check_mode(name: str, mode: int) -> None:
    """Raise InvalidModel for a world-writable file, through which any user could run code here."""
    if mode & stat.S_IWOTH:
        raise InvalidModel(
            f"{name} is writable by everybody (mode {stat.S_IMODE(mode):o}), so its code is not "
            "run: remove the permission (chmod o-w)"
        )
