"""S3: data from a repository or client is never executed as code."""

import ast
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.doubling import export_double

import xlaserve
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext

SOURCES = Path(xlaserve.__file__).parent
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "import_module"}
RUNS_CODE = {
    "python_models": "models that are code, behind allow_python_models",
    "files/references.py": "what the command line names",
    "__init__.py": "the homes of public names, a table of its own",
    "cli/commands.py": "commands, by a table of its own",
    "tensors/content_types.py": "codecs, by a table of its own",
    "serving/observability/opentelemetry.py": "an optional package, by its name",
    "serving/observability/gpus.py": "an optional package, by its name",
    "artifact/custom_calls.py": "libraries of jaxlib, by a table of its own",
    "runtime/loaders.py": "loaders, by a table of its own",
    "row_proofs/__init__.py": "rules, by a table of its own",
    "storage/fsspec_store.py": "an optional package, by its name",
    "runtime/trial.py": "the loader that a table names",
    "http/json/json_numbers.py": "an optional package, by its name",
}
"""Modules that run code with the operator's permission, and why."""


def found() -> Iterator[str]:
    """Yield every import and every call by which data could become code."""
    for path in sorted(SOURCES.rglob("*.py")):
        place = path.relative_to(SOURCES).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            else:
                names = set()
            for name in names & FORBIDDEN_MODULES:
                yield f"{place}:{node.lineno}: imports {name}"  # type: ignore[attr-defined]
            if isinstance(node, ast.Call) and not place.startswith(tuple(RUNS_CODE)):
                yield from (f"{place}:{node.lineno}: {what}" for what in _forbidden(node))


def _forbidden(call: ast.Call) -> Iterator[str]:
    function = call.func
    name = function.id if isinstance(function, ast.Name) else ""
    if isinstance(function, ast.Attribute) and function.attr in ("__import__", "import_module"):
        name = function.attr
    if name in FORBIDDEN_CALLS:
        yield f"calls {name}"
    for keyword in call.keywords:
        value = getattr(keyword.value, "value", None)
        if keyword.arg == "allow_pickle" and value is not False:
            yield "allows pickles"


def test_no_data_is_unpickled_evaluated_or_imported() -> None:
    assert [] == list(found())


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


def test_a_canary_sings_where_it_is_unpickled(tmp_path: Path) -> None:
    """Control: the check below would notice code execution."""
    pickle.loads(pickle.dumps(Canary(tmp_path / "sung")))

    assert (tmp_path / "sung").is_dir()


def test_a_canary_in_any_file_of_a_model_never_sings(tmp_path: Path) -> None:
    export_double(tmp_path / "whole")
    whole = tmp_path / "whole" / "double" / "1"
    canary = pickle.dumps(Canary(tmp_path / "sung"))
    names = [path.name for path in whole.iterdir()]
    for number, name in enumerate([*names, "model.onnx", "model.pkl", "model.joblib", "model.npy"]):
        broken = tmp_path / f"broken-{number}" / "1"
        if name in names:
            shutil.copytree(whole, broken)
        else:
            broken.mkdir(parents=True)
        (broken / name).write_bytes(canary)
        with pytest.raises(InvalidModel):
            loaders.load(broken, LoadContext(model="m", version="1", config=ModelConfig()))

    assert len(names) >= 3
    assert not (tmp_path / "sung").exists()
