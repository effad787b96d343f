"""Every place that evaluates or executes untrusted data is stopped by its documented limit."""

import ast
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import security_page
from xlaserve.artifact import artifact, dimensions, manifest, weights
from xlaserve.artifact import generator_record as record
from xlaserve.artifact.sizes import LIMIT_ARTIFACT_BYTES
from xlaserve.errors import InvalidModel
from xlaserve.files.files import FileRecord
from xlaserve.files.roots import ANYWHERE
from xlaserve.importers.pt2 import guards
from xlaserve.language import files as language_files
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS
from xlaserve.model_config.text import parse_json, parse_pbtxt
from xlaserve.offline import confined
from xlaserve.runtime.programs import trials
from xlaserve.runtime.programs.compilers.limits import FILE_BYTES, OPEN_FILES
from xlaserve.runtime.programs.compilers.pool import COMMAND, variables
from xlaserve.runtime.programs.compilers.process import CompilerProcess, ProcessEndedError
from xlaserve.runtime.programs.program_table import Program
from xlaserve.runtime.programs.second_net import MAX_SECONDS, within

TESTS = Path(__file__).parents[1]
SMALL = 256 << 20
ROWS = (*confined.PROCESSES, *confined.TEXTS, *confined.EXECUTIONS)


def compilation(tmp_path: Path) -> None:
    """The kernel enforces a process's limits before its first job."""
    made = CompilerProcess((*COMMAND, str(os.getpid()), str(SMALL)), variables())
    try:
        made.line()
        lines = Path(f"/proc/{made.pid}/limits").read_text().splitlines()[1:]
    finally:
        made.stop()

    found = {line[:26].strip(): line[26:47].strip() for line in lines}
    assert ["0", str(FILE_BYTES), str(OPEN_FILES)] == [
        found[name] for name in ("Max core file size", "Max file size", "Max open files")
    ]
    assert SMALL < int(found["Max data size"]) < SMALL + (16 << 30)


def export(tmp_path: Path) -> None:
    limits = trials._own_processes(7.0).limits

    assert (trials.MEMORY_BYTES, 7.0, 140.0) == (
        limits.bytes,
        limits.trial_seconds,
        limits.job_seconds,
    )


def target(tmp_path: Path) -> None:
    """A process that exceeds its memory limit is killed, whatever it is doing."""
    code = "import time; kept = bytearray(b'x' * (200 << 20)); time.sleep(600)"
    made = CompilerProcess((sys.executable, "-c", code), dict(os.environ))
    try:
        with pytest.raises(ProcessEndedError, match=f"took more than {100 << 20} bytes"):
            made.ask(b"", (), 300.0, most_bytes=100 << 20)
    finally:
        made.stop()


def shapes(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="more than 32 factors"):
        dimensions.check(["s^200000000"])


def conditions(tmp_path: Path) -> None:
    """Nested powers, which need gigabytes from the twelfth on."""
    text = "2"
    for _ in range(12):
        text = f"({text})**8"
    with pytest.raises(InvalidModel, match="cannot be read"):
        guards.holds(f"{text} > 1", {})


def over(path: Path, size: int) -> None:
    """Make a sparse file of this size."""
    with path.open("wb") as file:
        file.truncate(size)


def described(tmp_path: Path) -> None:
    over(tmp_path / manifest.FILE_NAME, manifest.LIMIT_BYTES + 1)
    with pytest.raises(InvalidModel, match=manifest.FILE_NAME):
        manifest.read(tmp_path)


def configuration(tmp_path: Path) -> None:
    for parse, text in ((parse_json, '{"a":' * 5000), (parse_pbtxt, "input {" * 5000)):
        with pytest.raises(InvalidModel):
            parse(text)
        with pytest.raises(InvalidModel, match="1048576"):
            parse(" " * ((1 << 20) + 1))


def header(tmp_path: Path) -> None:
    length = weights.MAX_HEADER_BYTES + 1
    with (tmp_path / manifest.WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(length + 8)
    with pytest.raises(InvalidModel, match="header"):
        weights.read_entries(tmp_path, manifest.WEIGHTS)


def computation(tmp_path: Path) -> None:
    over(tmp_path / manifest.ARTIFACT, LIMIT_ARTIFACT_BYTES + 1)
    with pytest.raises(InvalidModel, match=str(LIMIT_ARTIFACT_BYTES)):
        artifact._read_file(tmp_path, manifest.ARTIFACT, FileRecord(1, ""), ANYWHERE)


def generator(tmp_path: Path) -> None:
    over(tmp_path / record.FILE_NAME, record.LIMIT_BYTES + 1)
    with pytest.raises(InvalidModel, match=record.FILE_NAME):
        record.read(tmp_path)


def tokenizer(tmp_path: Path) -> None:
    over(tmp_path / language_files.TOKENIZER, language_files.LIMITS[language_files.TOKENIZER] + 1)
    with pytest.raises(InvalidModel, match=language_files.TOKENIZER):
        language_files.read(tmp_path, language_files.TOKENIZER, language_files.open_plain)


def second_net(tmp_path: Path) -> None:
    """A longer computation is not executed."""
    programs = [Program(lambda leaves, arrays: [], rows, (), MAX_SECONDS) for rows in (1, 8)]

    assert [] == within(programs, MAX_SECONDS)


CHECKS: dict[str, Callable[[Path], None] | str] = {
    "trial load": "models/test_trial.py::test_memory_of_a_trial_load_is_limited",
    "compilation, proof": compilation,
    "trial of rows, first execution": "models/test_trials.py::test_memory_of_a_trial_is_limited",
    "trial at export": export,
    "compilation for a target": target,
    "chat template": "language/test_templates.py::test_a_template_that_takes_too_much_is_ended",
    "grammar": "models/generation/test_grammars.py::"
    "test_a_grammar_that_takes_too_much_is_ended_and_others_go_on",
    "tokenizer": "language/test_linear.py::"
    "test_a_text_that_takes_too_much_is_refused_and_the_next_is_not",
    "Python model": "contract/test_process_memory.py::test_a_process_that_holds_too_much_is_ended",
    "symbolic dimensions": shapes,
    "conditions on sizes": conditions,
    "manifest": described,
    "configuration": configuration,
    "header of parameters": header,
    "artifact": computation,
    "program of PyTorch": "models/pt2/test_archive.py::"
    "test_a_program_that_is_too_large_is_not_parsed",
    "generator": generator,
    "quick tokenizer": tokenizer,
    "warm-up, samples of `model_warmup`": "contract/test_endless_loads.py::"
    "test_a_load_that_does_not_end_fails_and_others_go_on",
    "second net below a proof": second_net,
    "comparison with onnxruntime": "models/onnx/test_watching.py::"
    "test_a_loop_that_does_not_end_is_ended",
}
"""A check for each row, or the name of another test that checks it."""


def test_every_row_has_a_check_and_no_other_has() -> None:
    assert [row.name for row in ROWS] == list(CHECKS)


@pytest.mark.parametrize("name", [name for name, check in CHECKS.items() if callable(check)])
def test_hostile_data_is_ended_by_the_limit_of_its_row(name: str, tmp_path: Path) -> None:
    check = CHECKS[name]
    assert callable(check)
    check(tmp_path)


@pytest.mark.parametrize("place", [check for check in CHECKS.values() if isinstance(check, str)])
def test_tests_elsewhere_are_there(place: str) -> None:
    file, _, name = place.partition("::")
    tree = ast.parse((TESTS / file).read_text())
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]

    assert name in {node.name for node in found}


def test_modules_of_the_rows_are_there() -> None:
    server = Path(confined.__file__).parents[1]

    assert [] == [row.defined for row in ROWS if not (server / row.defined).exists()]


OF_TEXTS = {
    "chat template": DEFAULT_TEXT_LIMITS.template,
    "grammar": DEFAULT_TEXT_LIMITS.grammar,
    "tokenizer": DEFAULT_TEXT_LIMITS.tokenizer,
}


@pytest.mark.parametrize("name", OF_TEXTS)
def test_the_page_names_each_limit_of_a_process_of_texts(name: str) -> None:
    (row,) = (row for row in confined.PROCESSES if row.name == name)
    limits = OF_TEXTS[name]
    sizes = [f"{limits.memory_bytes >> 20} MiB beyond", *_answers(limits.output_bytes)]

    assert [] == [size for size in sizes if size not in row.memory]
    assert f"{limits.cpu_seconds:g} of CPU time (`" in row.seconds
    assert f"_seconds`), {limits.seconds:g} of elapsed time" in row.seconds
    assert f"up to {DEFAULT_TEXT_LIMITS.waiting} queued texts each" in row.where


def _answers(count: int) -> list[str]:
    return [f"results of {count >> 20} MiB" if count >> 20 else f"results of {count >> 10} KiB"]


def test_the_page_is_fresh() -> None:
    text = security_page.PAGE.read_text()

    assert security_page.page(text) == text
