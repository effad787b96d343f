"""Imports operator code by reference: `file.py:name` or `package.module:name`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from xlaserve.errors import InvalidReference


def load_reference(reference: str) -> object:
    """Import the object that a reference names, which runs its module.

    Raises InvalidReference if the file, module or name does not exist.
    """
    source, _, attribute = reference.rpartition(":")
    if not source or not attribute.isidentifier():
        raise InvalidReference(f"expected FILE.py:NAME or MODULE:NAME, got '{reference}'")
    module = _run_file(Path(source)) if source.endswith(".py") else _import(source)
    found: object = getattr(module, attribute, None)
    if found is None:
        raise InvalidReference(f"{source} has no '{attribute}'")
    return found


def _run_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InvalidReference(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    # As with `python FILE.py`: dataclasses look up their module in sys.modules, and the file may
    # import its neighbors.
    before = sys.modules.get(path.stem)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent.resolve()))
        if before is not None:
            sys.modules[path.stem] = before
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InvalidReference(f"no such module: '{error.name}'") from error
