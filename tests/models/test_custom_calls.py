"""Custom calls of serialized programs: found in the bytes, allowed, and registered."""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import xlaserve
from xlaserve.artifact import custom_calls
from xlaserve.artifact.custom_calls import CPU, LIBRARIES, UnknownCustomCall, targets_of
from xlaserve.runtime.programs import serialized

MATRIX = np.array([[2, 1], [1, 2]], np.float32)
_REGISTERS = re.compile(r"def registrations\(|\.register_custom_call_target\(")


@pytest.fixture(scope="module")
def program() -> bytes:
    """A program that computes the eigenvalues of a matrix."""
    return serialized.written(jax.jit(jnp.linalg.eigvalsh).lower(MATRIX).compile())


def test_targets_are_read_out_of_a_program(program: bytes) -> None:
    plain = serialized.written(jax.jit(lambda a: a @ a).lower(MATRIX).compile())

    assert {"lapack_ssyevd_ffi"} == targets_of(program)
    assert set() == targets_of(plain)
    assert custom_calls._PARAMETER in plain


def test_a_program_that_calls_what_nobody_has_is_refused_by_name(program: bytes) -> None:
    other = program.replace(b"lapack_ssyevd_ffi", b"lapack_xsyevd_ffi")
    device = jax.local_devices(backend="cpu")[0]

    with pytest.raises(UnknownCustomCall, match="'lapack_xsyevd_ffi', which the installed jaxlib"):
        serialized.loaded(other, None, None, [device])


def test_every_library_of_jaxlib_has_a_row() -> None:
    """A module that a later jaxlib brings is named here before a server meets its programs."""
    root = Path(jaxlib.__file__).parent
    found = {
        name
        for _, name, _ in pkgutil.iter_modules([str(root)])
        if (root / f"{name}.py").exists() and name != "xla_client"
        if _REGISTERS.search((root / f"{name}.py").read_text())
    }

    assert {library.module for library in LIBRARIES} == found
    for library in LIBRARIES:
        assert importlib.import_module(f"jaxlib.{library.module}")


def test_functions_of_the_cpu_are_registered() -> None:
    from jaxlib import cpu_sparse, lapack

    expected = {
        name
        for module in (lapack, cpu_sparse)
        for functions in module.registrations().values()
        for name, *_ in functions
    }

    assert len(expected) > 50
    assert expected <= custom_calls._known(CPU)


_ALONE = """
import sys
from pathlib import Path
import jax, numpy as np
from xlaserve.runtime.devices import jax_runtime
from xlaserve.runtime.programs import serialized
jax_runtime.start("cpu")
takes, returns = (jax.tree.structure(tree) for tree in (((0,), {}), 0))
device = jax.local_devices()[0]
program = serialized.loaded(Path(sys.argv[1]).read_bytes(), takes, returns, [device])
print(np.asarray(program(np.array([[2, 1], [1, 2]], np.float32))).tolist())
"""


def test_a_process_that_never_lowered_runs_linear_algebra(program: bytes, tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(program)
    command = [sys.executable, "-c", _ALONE, str(tmp_path / "program")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert 0 == ran.returncode, ran.stderr[-2000:]
    assert np.allclose([1, 3], json.loads(ran.stdout))


def test_programs_are_deserialized_in_one_place() -> None:
    sources = Path(xlaserve.__file__).parent.rglob("*.py")
    using = [path.name for path in sources if "serialize_executable" in path.read_text()]

    assert ["serialized.py"] == using
