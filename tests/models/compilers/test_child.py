"""Compilation in another process gives the same programs as in the server, or is refused."""

import errno
import hashlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.plain_models import load_plain

import xlaserve
from xlaserve.errors import InvalidModel, OutOfMemory
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.programs import compilation_cache, proving
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.compilation_cache import CompilationCache
from xlaserve.runtime.programs.compilers.child import Child
from xlaserve.runtime.programs.compilers.jobs import Answer, Job, Proof
from xlaserve.runtime.programs.compilers.pool import CompilationError, Refused
from xlaserve.runtime.programs.executables import Executables
from xlaserve.runtime.programs.shared_programs import SharedPrograms

Change = Callable[[Job], Job]


class Elsewhere:
    """Compiles and proves like a compiler process, but within this one."""

    count = 0
    """No process is started before it is asked."""

    def __init__(self, change: Change = lambda job: job) -> None:
        self.jobs: list[Job] = []
        """Jobs that compile a program."""
        self.proofs: list[Proof] = []
        self.answers: list[Answer] = []
        self._child = Child()
        self._change = change

    def compile(
        self, job: Job, artifact: Callable[[], bytes], check_cancelled: Callable[[], None]
    ) -> bytes:
        check_cancelled()
        self._child.take(job.computation, artifact())
        answer, data = self._child.done(self._change(job))
        if job.proof is None:
            self.jobs.append(job)
            self.answers.append(answer)
        else:
            self.proofs.append(job.proof)
        if answer.refused:
            raise Refused(answer.refused)
        if answer.error:
            raise CompilationError(answer.error)
        assert (len(data), answer.sha256) == (
            answer.executable_bytes,
            hashlib.sha256(data).hexdigest(),
        )
        return data


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a model with a packed parameter, an unpacked one, and a variable dimension."""
    return xlaserve.export_model(
        lambda p, x: {"y": x * p["v"].sum() + p["b"], "n": x > p["b"]},
        {"v": np.full(1000, 0.003, np.float32), "b": np.float32(1)},
        {"x": ("FP32", [-1, "n"])},
        tmp_path_factory.mktemp("models") / "m" / "1",
        max_batch_size=2,
    )


CONFIG = ModelConfig(parameters={"compiled_shapes": "3", "max_on_demand_shapes": "2"})


def loaded(
    directory: Path, processes: object, config: ModelConfig = CONFIG, **more: Any
) -> JaxExportModel:
    compilation = Compilation(processes=processes, **more)  # type: ignore[arg-type]
    return load_plain(directory, LoadContext("m", "1", config, compilation=compilation))


@pytest.fixture
def in_server(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Record what the server itself lowers."""
    lower = Executables.lowered
    lowered: list[object] = []

    def noted(self: Executables, wanted: Any) -> Any:
        lowered.append(wanted)
        return lower(self, wanted)

    monkeypatch.setattr(Executables, "lowered", noted)
    return lowered


def test_a_program_gives_the_same_bits_and_the_server_lowers_nothing(
    directory: Path, in_server: list[object]
) -> None:
    """This covers programs of the load, and one compiled for a request."""
    elsewhere = Elsewhere()
    here, there = loaded(directory, None), loaded(directory, elsewhere)
    by_server = len(in_server)
    for rows, size in ((1, 3), (2, 3), (2, 5)):
        x = np.random.default_rng(0).standard_normal((rows, size)).astype(np.float32)
        answers = []
        for model in (here, there):
            assert model.on_demand is not None
            shape = model.on_demand.shape_of({"x": x})
            one = model if shape is None else model.on_demand.compile(shape)
            answers.append(one.execute({"x": x}))
        for name in ("y", "n"):
            np.testing.assert_array_equal(answers[0][name], answers[1][name])

    assert by_server + 1 == len(in_server)
    assert [(1, 3), (2, 3), (2, 5)] == [job.inputs[0].shape for job in elsewhere.jobs]
    assert here.info.compiled_programs == there.info.compiled_programs == 3
    assert here.info.memory.total_bytes == there.info.memory.total_bytes


def _mixing(p: Any, x: Any) -> dict[str, Any]:
    return {"y": x * p + x.sum(0, keepdims=True)}


def _looping(p: Any, x: Any) -> dict[str, Any]:
    return {"y": jax.lax.while_loop(lambda y: y.sum() < 1, lambda y: y + p, x)}


@pytest.mark.parametrize(
    ("function", "shape", "follows"), [(_mixing, [-1, 3], False), (_looping, [3], True)]
)
def test_a_process_proves_what_the_server_would(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., Any],
    shape: list[int],
    follows: bool,
) -> None:
    """Without a variable dimension only loops are analyzed."""
    one = np.float32(1)
    directory = xlaserve.export_model(
        function, one, {"x": ("FP32", shape)}, tmp_path / "m" / "1", max_batch_size=0
    )
    here = loaded(directory, None, ModelConfig())
    monkeypatch.setattr(proving, "answered", None)
    there = loaded(directory, elsewhere := Elsewhere(), ModelConfig())

    assert here.info.verdict == there.info.verdict
    assert (follows, follows) == (here.info.loops_follow_inputs, there.info.loops_follow_inputs)
    assert [follows] == [proof.of_loops for proof in elsewhere.proofs]
    assert follows == (there.info.verdict is None)


@pytest.mark.parametrize("part", ["module", "environment"])
def test_a_process_with_other_lines_or_versions_proves_nothing(
    directory: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    def change(job: Job) -> Job:
        if job.proof is None or part == "environment":
            return replace(job, environment={"jaxlib": "0.1"})
        return replace(job, proof=replace(job.proof, module="another"))

    model = loaded(directory, Elsewhere(change))

    assert model.info.verdict == loaded(directory, None).info.verdict
    assert 1 == capsys.readouterr().out.count("rows analyzed in the server process")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda job: replace(job, environment={**job.environment, "jaxlib": "0.1"}), "jaxlib: exp"),
        (lambda job: replace(job, environment={**job.environment, "processor": "x"}), "processor"),
        (lambda job: replace(job, program={**job.program, "packing": "x"}), "packing: expected"),
        (lambda job: replace(job, device=7), "it needs 8 devices, got 2"),
        (lambda job: replace(job, computation="other"), "its artifact is missing"),
    ],
)
def test_a_process_that_differs_from_the_server_compiles_nothing(
    directory: Path,
    in_server: list[object],
    capsys: pytest.CaptureFixture[str],
    change: Change,
    reason: str,
) -> None:
    model = loaded(directory, Elsewhere(change))
    printed = capsys.readouterr().out

    assert 2 == len(in_server) == model.info.compiled_programs
    assert 1 == printed.count("compiled in the server")
    assert reason in printed


def test_what_cannot_be_serialized_is_compiled_in_the_server(
    directory: Path,
    in_server: list[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refusing(executable: object) -> None:
        raise ValueError("no pickles today")

    monkeypatch.setattr("jax.experimental.serialize_executable.serialize", refusing)
    loaded(directory, Elsewhere())

    assert 2 == len(in_server)
    assert "it cannot be serialized: no pickles today" in capsys.readouterr().out


def test_what_cannot_be_deserialized_is_compiled_in_the_server(
    directory: Path,
    in_server: list[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def cut(self: Elsewhere, *arguments: Any) -> bytes:
        return b"cut"

    monkeypatch.setattr(Elsewhere, "compile", cut)
    loaded(directory, Elsewhere())

    assert 2 == len(in_server)
    assert "it cannot be loaded" in capsys.readouterr().out


def test_a_sharded_model_is_compiled_in_the_server(
    directory: Path, in_server: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = {"devices": "all", "placement": "shard", "partition": '{"v": ["model"]}'}
    elsewhere = Elsewhere()
    config = replace(CONFIG, parameters={**CONFIG.parameters, **parameters})
    loaded(directory, elsewhere, config)

    assert [] == elsewhere.jobs
    assert 2 == len(in_server)
    assert "reason=it is sharded" in capsys.readouterr().out.replace("'", "")


@pytest.mark.slow
def test_copies_are_compiled_each_for_its_device(directory: Path, in_server: list[object]) -> None:
    elsewhere = Elsewhere()
    config = replace(CONFIG, parameters={**CONFIG.parameters, "devices": "all"})
    model = loaded(directory, elsewhere, config)
    x = np.ones((2, 3), np.float32)

    assert [] == in_server
    assert [0, 1, 0, 1] == [job.device for job in elsewhere.jobs]
    for replica in range(model.replicas):
        found = model.execute({"x": x}, replica=replica)["y"]
        np.testing.assert_allclose(np.asarray(found), 4, rtol=1e-5)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("RESOURCE_EXHAUSTED: too much", OutOfMemory),
        ("INVALID_ARGUMENT: no such shape", InvalidModel),
    ],
)
def test_what_xla_says_elsewhere_means_what_it_means_here(
    directory: Path, monkeypatch: pytest.MonkeyPatch, said: str, expected: type[Exception]
) -> None:
    def failing(self: Child, job: Job) -> tuple[Answer, bytes]:
        return Answer(error=said), b""

    monkeypatch.setattr(Child, "compiled", failing)

    with pytest.raises(expected, match=said.partition(": ")[2]):
        loaded(directory, Elsewhere())


@pytest.mark.slow
def test_a_compilation_is_niced_once_another_model_has_programs(directory: Path) -> None:
    """The first model of a server competes with no other, so its programs compile unniced."""
    elsewhere, programs = Elsewhere(), SharedPrograms()
    compilation = Compilation(processes=elsewhere)  # type: ignore[arg-type]
    context = LoadContext("m", "1", CONFIG, compilation=compilation, programs=programs)
    first = load_plain(directory, context)
    other = xlaserve.export_model(
        lambda p, x: {"y": x * p}, np.float32(3), {"x": ("FP32", [2])}, directory.parent / "o" / "1"
    )
    load_plain(other, replace(context, config=ModelConfig()))
    first.close()

    assert [False, False, True] == [job.is_niced for job in elsewhere.jobs]


@pytest.mark.slow
def test_a_process_is_niced_by_the_first_job_that_asks_for_it() -> None:
    """All of its threads, once: XLA's threads started earlier, and compile too."""
    script = textwrap.dedent("""
        import io, os, threading
        from dataclasses import replace
        import msgspec
        from xlaserve.runtime.programs.compilers import child
        from xlaserve.runtime.programs.compilers.jobs import Answer, Job, Packed

        end, seen = threading.Event(), []
        thread = threading.Thread(target=end.wait)
        thread.start()
        before = os.getpriority(os.PRIO_PROCESS, 0)

        class Nothing:
            def done(self, job):
                own, other = 0, thread.native_id
                seen.append([os.getpriority(os.PRIO_PROCESS, one) - before for one in (own, other)])
                return Answer(), b""

        job = Job("m", "c", 0, Packed(0, (), {}, ()), (), (), {}, {})
        jobs = [replace(job, is_niced=niced) for niced in (False, True, True, False)]
        lines = b"".join(msgspec.json.encode(one) + b"\\n" for one in jobs)
        child.main(Nothing(), io.BytesIO(lines), io.BytesIO())
        end.set()
        print(before, seen)
    """)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    before, seen = ran.stdout.split(maxsplit=1)
    by = min(19, int(before) + 10) - int(before)

    assert [[0, 0], *[[by, by]] * 3] == json.loads(seen)


def test_what_jax_raises_elsewhere_is_repeated(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(exported: object, packing: object) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr("xlaserve.runtime.programs.compilers.child.function", failing)

    with pytest.raises(InvalidModel, match="cannot be compiled or run: no such argument"):
        loaded(directory, Elsewhere())


def test_what_is_compiled_elsewhere_is_kept_in_the_cache_as_it_came(
    directory: Path, tmp_path: Path, in_server: list[object]
) -> None:
    """The next load compiles nothing, in this process or another."""
    cache = CompilationCache(tmp_path / "cache", 1 << 30)
    cache.prepare("cpu")
    elsewhere = Elsewhere()
    first = loaded(directory, elsewhere, cache=cache)
    again = loaded(directory, elsewhere, cache=cache)
    kept = {path.stem for path in (tmp_path / "cache").glob("*/*.xla")}

    assert [] == in_server
    assert {answer.sha256 for answer in elsewhere.answers} == kept
    assert (2, 0) == (first.info.compiled_programs, first.info.cached_programs)
    assert (0, 2) == (again.info.compiled_programs, again.info.cached_programs)
    assert 2 == len(elsewhere.jobs)
    assert 1 == len(elsewhere.proofs), "no process is started for a proof alone"


def test_a_full_disk_of_the_cache_ends_no_load(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = CompilationCache(tmp_path / "cache", 1 << 30)
    cache.prepare("cpu")
    monkeypatch.setattr(compilation_cache, "_replace", full)
    model = loaded(directory, Elsewhere(), cache=cache)

    assert 2 == model.info.compiled_programs
    assert 1 == capsys.readouterr().out.count("compiled programs not kept")
