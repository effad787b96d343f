"""Apply small mutations to a copy of the server; for each, a test should fail.

    python tools/mutants.py --package rows --seed 1 --count 20

Prints which mutants were detected, and the others as patches. Succeeds if at least 95 % were
detected. A package is any part of the path below server/xlaserve: `rows`, `serving`, `shape.py`.

The tests of all sampled modules first run without a mutation, to record the lines that each
executes. A mutant inside a function is run in a fork of the pytest that collected those tests,
against the tests that execute its line. A mutant of code that runs at import, and every mutant on
Python 3.11, is run against all tests of its module.
"""

import argparse
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TypeAlias

import executed
from mutations import Mutation, mutations
from warm import UNLIKE

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("server", "xlaserve")
SHARE = 0.95
"""Share of the mutants that tests must detect."""
HOMES: Mapping[str, Sequence[str]] = {
    "app": ("tests/assembly", "tests"),
    "artifact": ("tests/models",),
    "authoring": ("tests/models",),
    "bench": ("tests/benchmark", "tests/cli"),
    "build": ("tests",),
    "cli": ("tests/cli",),
    "client": ("tests",),
    "concurrency": ("tests/core/threads",),
    "dialing": ("tests/interop",),
    "errors": ("tests",),
    "files": ("tests/models", "tests"),
    "generation": ("tests/models/generation",),
    "grpc": ("tests/transport/grpc",),
    "grpc/http2": ("tests/transport/http2",),
    "grpc_web": ("tests/transport/grpc_web",),
    "http": ("tests/transport/rest",),
    "importers": ("tests/models/onnx", "tests/models/huggingface", "tests/models/pt2"),
    "importers/huggingface": ("tests/models/huggingface",),
    "importers/onnx": ("tests/models/onnx",),
    "importers/pt2": ("tests/models/pt2",),
    "language": ("tests/language",),
    "local": ("tests",),
    "model_config": ("tests/models",),
    "net": ("tests/transport",),
    "offline": ("tests/models/targets", "tests/cli"),
    "openai": ("tests/contract", "tests/transport/rest"),
    "process": ("tests", "tests/processes"),
    "python_models": ("tests/models/python",),
    "residence": ("tests/core/residence", "tests/core"),
    "row_proofs": ("tests/models/rows",),
    "runtime": ("tests/models",),
    "serving": ("tests/core/serving", "tests/core"),
    "settings": ("tests",),
    "storage": ("tests/models/storage",),
    "tensors": ("tests",),
    "testing": ("tests",),
    "workers": ("tests/processes",),
}
"""Directories with a package's tests, in files named after its modules. The longest prefix wins."""
THROUGH_THE_DOOR: Mapping[str, Sequence[str]] = {
    "app": (
        "tests/assembly/test_extensions.py",
        "tests/contract/test_v2_grpc.py",
        "tests/contract/test_v2_rest.py",
        "tests/test_app.py",
    ),
    "artifact": (
        "tests/models/test_artifact.py",
        "tests/models/test_manifest.py",
        "tests/models/test_single_file.py",
    ),
    "authoring": ("tests/models/test_export.py", "tests/models/test_jax_export.py"),
    "bench": ("tests/benchmark", "tests/cli/test_bench.py", "tests/cli/test_bench_generate.py"),
    "build": ("tests/test_build.py",),
    "cli": ("tests/cli",),
    "client": (
        "tests/test_client.py",
        "tests/test_client_memory.py",
        "tests/test_client_trees.py",
    ),
    "concurrency": ("tests/core", "tests/contract/test_v2_grpc.py"),
    "dialing": ("tests/cli/test_wrong_urls.py", "tests/test_client.py"),
    "errors": ("tests/test_errors.py", "tests/transport/test_status.py"),
    "files": (
        "tests/models/test_files.py",
        "tests/models/test_roots.py",
        "tests/test_temporary.py",
    ),
    "generation": ("tests/models/generation",),
    "grpc": ("tests/transport/grpc", "tests/contract/test_v2_grpc.py"),
    "grpc/http2": ("tests/transport/http2",),
    "grpc_web": ("tests/transport/grpc_web", "tests/contract/test_grpc_web.py"),
    "http": (
        "tests/transport/rest",
        "tests/contract/test_v2_rest.py",
        "tests/contract/test_v2_rest_fast_path.py",
    ),
    "importers": (
        "tests/contract/test_imported_language.py",
        "tests/contract/test_imported_pytorch.py",
        "tests/contract/test_onnx_served.py",
    ),
    "importers/huggingface": (
        "tests/models/huggingface",
        "tests/contract/test_imported_language.py",
    ),
    "importers/onnx": ("tests/models/onnx", "tests/contract/test_onnx_served.py"),
    "importers/pt2": ("tests/models/pt2", "tests/contract/test_imported_pytorch.py"),
    "language": ("tests/language",),
    "local": ("tests/test_serving_from_python.py",),
    "model_config": (
        "tests/models/test_config.py",
        "tests/models/test_config_fields.py",
        "tests/models/test_config_message.py",
        "tests/models/test_config_served.py",
        "tests/models/test_ragged.py",
    ),
    "net": ("tests/transport/test_rounds.py", "tests/transport/test_tls.py"),
    "offline": ("tests/models/targets", "tests/cli/test_doctor.py", "tests/cli/test_warm.py"),
    "openai": (
        "tests/contract/test_openai.py",
        "tests/contract/test_openai_fields.py",
        "tests/contract/test_openai_tools.py",
    ),
    "process": ("tests/test_children.py", "tests/test_signals.py", "tests/processes"),
    "python_models": (
        "tests/models/python",
        "tests/contract/test_model_processes.py",
        "tests/contract/test_python_models.py",
        "tests/contract/test_triton_models.py",
    ),
    "residence": (
        "tests/contract/test_model_repository.py",
        "tests/contract/test_model_runtime_load.py",
        "tests/core/residence/test_multi_model.py",
    ),
    "row_proofs": ("tests/models/rows", "tests/contract/test_rows.py"),
    "runtime": ("tests/models/test_jax_export.py", "tests/models/test_sequence_model.py"),
    "serving": (
        "tests/core/serving",
        "tests/contract/test_batching.py",
        "tests/contract/test_sequences.py",
        "tests/contract/test_v2_grpc.py",
    ),
    "settings": ("tests/test_settings.py", "tests/test_sagemaker_environment.py"),
    "storage": ("tests/models/storage", "tests/contract/test_stores.py"),
    "tensors": ("tests/test_tensors.py", "tests/test_content_types.py"),
    "testing": ("tests/test_serving_from_python.py",),
    "workers": ("tests/processes",),
}
"""Tests for all modules of a package, in addition to those named after a module or importing it;
the longest prefix wins.
"""
KILLED, STOPPED, LIVED = "killed", "killed by time", "LIVED"
_QUIET = {"OPENBLAS_NUM_THREADS": "1"}
"""Keeps numpy from starting threads on import."""
_TEST_SECONDS = 120
_MORE_SECONDS = 60.0
"""Seconds beyond three times the tests' duration after which a mutant counts as detected."""


@dataclass(frozen=True)
class Mutant:
    """A mutation of a file, whose path is relative to the root."""

    path: Path
    mutation: Mutation

    def __str__(self) -> str:
        return f"{self.path}:{self.mutation.start[0]} {self.mutation.kind}"


def sample(root: Path, package: str, seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants of a package, the same for equal seeds; fewer if it has fewer."""
    every = [
        Mutant(path.relative_to(root), mutation)
        for path in modules(root, package)
        for mutation in mutations(path.read_text())
    ]
    return Random(seed).sample(every, min(count, len(every)))


def modules(root: Path, package: str) -> list[Path]:
    """Return the modules whose path contains `package`, in order."""
    base = root / PACKAGE
    wanted = f"/{package.strip('/').replace('.', '/').removesuffix('/py')}/"
    return sorted(
        path
        for path in base.rglob("*.py")
        if wanted in f"/{path.relative_to(base).with_suffix('').as_posix()}/"
    )


def tests_of(root: Path, path: Path) -> tuple[str, ...]:
    """Return the tests of a module, starting with those named after it."""
    inner = path.relative_to(PACKAGE).with_suffix("")
    name = inner.parent.name if inner.name == "__init__" else inner.name
    named = [
        file.relative_to(root).as_posix()
        for home in row_of(HOMES, inner)
        for pattern in (f"test_{name}.py", f"test_{name}_*.py")
        for file in sorted((root / home).glob(pattern))
    ]
    through = [one for one in row_of(THROUGH_THE_DOOR, inner) if (root / one).exists()]
    return tuple(dict.fromkeys((*named, *_importers(root, inner), *through))) or ("tests",)


def row_of(table: Mapping[str, Sequence[str]], inner: Path) -> Sequence[str]:
    """Return the entry for the longest matching prefix of a module's path, or an empty one."""
    prefixes = ("/".join(inner.parts[:count]) for count in range(len(inner.parts), 0, -1))
    return next((table[one] for one in prefixes if one in table), ())


def _importers(root: Path, inner: Path) -> Iterator[str]:
    dotted = ".".join(("xlaserve", *inner.parts))
    parent, _, name = dotted.rpartition(".")
    wanted = re.compile(
        rf"(?m)^\s*(?:from {re.escape(dotted)} import|import {re.escape(dotted)}\b"
        rf"|from {re.escape(parent)} import (?:\(\s*)?[\w, \n]*\b{re.escape(name)}\b)"
    )
    for name, text in _texts(root):
        if wanted.search(text):
            yield name


@cache
def _texts(root: Path) -> Sequence[tuple[str, str]]:
    """Read the tests of a tree once, as they are searched for every module."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [(file.relative_to(root).as_posix(), file.read_text()) for file in files]


@dataclass(frozen=True)
class Trial:
    """Results of running the tests without a mutation."""

    lines: Mapping[str, Mapping[str, Sequence[str]]]
    """File -> line -> its tests; a test file if its fixtures execute the line, "" if an import
    does.
    """
    seconds: Mapping[str, float]
    """Duration of each test."""
    whole: float
    """Duration of all tests."""

    def of(self, file: Path, mutation: Mutation) -> Sequence[str]:
        """Return the tests that execute a mutation, quick files first; none for import-time
        code.
        """
        lines = self.lines.get(str(file), {})
        span = range(mutation.start[0], mutation.end[0] + 1)
        names = {name for line in span for name in lines.get(str(line), ())}
        if "" in names:
            return ()
        by_file: dict[str, list[str]] = {}
        for one in self.seconds:
            of = one.partition("::")[0]
            if one in names or of in names:
                by_file.setdefault(of, []).append(one)
        quick_first = sorted(by_file.values(), key=self._taken)
        return [one for ones in quick_first for one in ones]

    def limit(self, tests: Sequence[str]) -> float:
        """Return the seconds after which the mutant is assumed to hang the tests."""
        return 3 * min(self._taken(tests), self.whole) + _MORE_SECONDS

    def _taken(self, tests: Sequence[str]) -> float:
        return sum(self.seconds.get(one, self.whole) for one in tests)


class Copy:
    """A copy of the tree, in which mutants are tested one at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._said = root / "said.txt"
        self._warm: _Warm | None = None

    def close(self) -> None:
        if self._warm is not None:
            self._warm.close()
        self._warm = None

    def trial(self, mutants: Sequence[Mutant]) -> Trial:
        """Run the tests of all mutants without a mutation; raises ValueError if they fail."""
        modules_of = dict.fromkeys(mutant.path for mutant in mutants)
        tests = list(dict.fromkeys(one for path in modules_of for one in tests_of(self.root, path)))
        noted = self.root / "executed.json"
        noting = {"EXECUTED_BELOW": str(self.root / PACKAGE), "EXECUTED_INTO": str(noted)}
        began = time.monotonic()
        self._warm = _Warm(
            lambda channel, inherited: self._started(tests, {**noting, **channel}, inherited)
        )
        if self._warm.threads < 2:
            code = self._warm.run([], [], None)
        else:
            print(f"{self._warm.threads} threads after collection: each mutant gets a process")
            self.close()
            code = self._run(tests, None, noting)
        if code:
            said = self._said.read_text(errors="replace")[-2000:]
            raise ValueError(f"without a mutation, {' '.join(tests)} ends with {code}:\n{said}")
        found = json.loads(noted.read_text()) if noted.exists() else {}
        taken = time.monotonic() - began
        return Trial(found.get("lines", {}), found.get("seconds", {}), taken)

    def fate(self, mutant: Mutant, trial: Trial) -> str:
        """Return the outcome of a mutant."""
        file = self.root / mutant.path
        source = file.read_text()
        other = mutant.mutation.applied(source)
        executing = trial.of(file, mutant.mutation)
        tests = executing or tests_of(self.root, mutant.path)
        limit = trial.limit(tests)
        code: int | None = UNLIKE
        try:
            # The file must change as well, for processes that the tests start.
            self._write(file, other)
            if executing and self._warm is not None:
                code = self._warm.run(executing, [str(file), source, other], limit)
            if code == UNLIKE:
                code = self._run(tests, limit)
        finally:
            self._write(file, source)
        return LIVED if code == 0 else KILLED if code is not None else STOPPED

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        # A .pyc counts as current for a source of equal length and modification second.
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def _run(
        self,
        tests: Sequence[str],
        seconds: float | None,
        noting: Mapping[str, str] = MappingProxyType({}),
    ) -> int | None:
        process = self._started(tests, noting)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)

    def _started(
        self, tests: Sequence[str], more: Mapping[str, str], *inherited: int
    ) -> "subprocess.Popen[bytes]":
        places = [str(self.root / name) for name in ("server", "generated")]
        places.append(str(Path(executed.__file__).parent))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "executed", "-p", "warm"]
        command += ["-p", "no:cacheprovider", "-p", "no:randomly"]
        limits = ["--numprocesses", "0", "--timeout", str(_TEST_SECONDS)]
        # The list may be longer than a command line allows.
        named = self.root / "tests.txt"
        named.write_text("".join(f"{one}\n" for one in tests))
        with self._said.open("wb") as output:
            return subprocess.Popen(
                [*command, *limits, f"@{named}"],
                cwd=self.root,
                env={**os.environ, **_QUIET, **more, "PYTHONPATH": os.pathsep.join(places)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=inherited,
                start_new_session=True,
            )


_Started: TypeAlias = Callable[[Mapping[str, str], int], "subprocess.Popen[bytes]"]


class _Warm:
    """A pytest process that has collected the tests, and runs them in forks."""

    def __init__(self, started: _Started) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            channel = {"WARM_CHANNEL": str(theirs.fileno())}
            self._process = started(channel, theirs.fileno())
        self._answers = self._channel.makefile("rb", buffering=0)
        self.threads = int(self._answers.readline() or 0)
        """Number of threads after collection (a fork keeps only one); 0 if the process has
        ended.
        """

    def run(self, tests: Sequence[str], edit: Sequence[str], seconds: float | None) -> int | None:
        """Run tests on an edited module, all if none is named; return None on timeout."""
        if not self.threads:
            return self._process.wait()
        self._channel.sendall(json.dumps({"tests": tests, "edit": edit}).encode() + b"\n")
        fork = int(self._answers.readline())
        in_time = select.select([self._channel], [], [], seconds)[0]
        if not in_time:
            _kill(fork)
        code = int(self._answers.readline())
        _kill(fork)
        return code if in_time else None

    def close(self) -> None:
        self._answers.close()
        self._channel.close()
        _end(self._process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a test run and its remaining processes."""
    _kill(process.pid)
    process.wait()


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def copied(root: Path, target: Path) -> None:
    """Copy the files that git tracks or would add."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)


def tried(root: Path, mutants: Sequence[Mutant]) -> int:
    """Test mutants of a tree, and print each outcome; return how many were detected."""
    noticed = 0
    with ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory(prefix="mutants-"))
        copy = Copy(Path(directory))
        stack.callback(copy.close)
        copied(root, copy.root)
        trial = copy.trial(mutants)
        for number, mutant in enumerate(mutants, 1):
            fate = copy.fate(mutant, trial)
            noticed += fate != LIVED
            print(f"{number}/{len(mutants)} {fate} {mutant}", flush=True)
            if fate == LIVED:
                source = (copy.root / mutant.path).read_text()
                print(mutant.mutation.diff(source, str(mutant.path)), flush=True)
    return noticed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--package", required=True, help="a part of the path of modules")
    parser.add_argument("--seed", type=int, nargs="+", default=[1], help="a sample for each")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--list", action="store_true", help="name the mutants, and try none")
    options = parser.parse_args(arguments)
    samples = (sample(ROOT, options.package, seed, options.count) for seed in options.seed)
    mutants = list(dict.fromkeys(mutant for found in samples for mutant in found))
    if not mutants:
        parser.error(f"no module below {PACKAGE} has '{options.package}' in its path")
    if options.list:
        for mutant in mutants:
            print(mutant, *tests_of(ROOT, mutant.path))
        return 0
    try:
        noticed = tried(ROOT, mutants)
    except ValueError as error:
        print(error)
        return 2
    print(f"killed {noticed} of {len(mutants)} ({noticed / len(mutants):.0%}), wanted {SHARE:.0%}")
    return 0 if noticed >= SHARE * len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
