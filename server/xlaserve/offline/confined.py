"""The table of places that evaluate or execute untrusted data, with their limits.

`tools/security_page.py` writes it into docs/security.md. For each row, a test checks that hostile
data is stopped.
"""

from dataclasses import dataclass
from pathlib import Path

from xlaserve.artifact import dimensions, manifest, sizes, weights
from xlaserve.artifact import generator_record as record
from xlaserve.importers.onnx import checking
from xlaserve.importers.pt2 import archive, guards
from xlaserve.language import files, grammars, linear, tokenizing
from xlaserve.language.limited import Limits
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS as _TEXTS
from xlaserve.model_config import text as config_text
from xlaserve.offline.targets import compiling
from xlaserve.runtime import trial
from xlaserve.runtime.programs import second_net, trials
from xlaserve.runtime.programs.compilers import limits as compilers
from xlaserve.settings import Settings

_DEFAULTS = Settings(repository=Path())
_MIB = 1 << 20
_GIB = 1 << 30
_NONE = "not limited"


@dataclass(frozen=True, slots=True)
class Confined:
    """A place that evaluates untrusted data, and its limits."""

    name: str
    data: str
    """The untrusted data and its source, for example a client."""
    where: str
    """The process or thread that evaluates it."""
    memory: str
    seconds: str
    files: str
    defined: str
    """The module that sets the limits."""


def _process_memory(setting: str, value: int) -> str:
    return f"{value // _GIB} GiB beyond its startup memory (`{setting}`)"


def _answer(limits: Limits) -> str:
    size = limits.output_bytes
    return (
        f", results of {size // _MIB} MiB" if size >= _MIB else f", results of {size // 1024} KiB"
    )


def _seconds(limits: Limits, kind: str) -> str:
    return f"{limits.cpu_seconds:g} of CPU time (`{kind}_seconds`), {limits.seconds:g}"


_TURNS = (
    f"; scheduled fairly between callers, up to {_TEXTS.waiting} queued texts each "
    "(`max_waiting_texts`)"
)

_TEXT_MEMORY = (
    f"{_DEFAULTS.text_process_bytes // _MIB} MiB beyond its startup memory (`text_process_bytes`)"
)

_COMPILER_FILES = (
    f"{compilers.OPEN_FILES} open files, written files up to "
    f"{compilers.FILE_BYTES // _MIB} MiB each; no core dump"
)
_COMPILER_MEMORY = _process_memory("compile_process_bytes", _DEFAULTS.compile_process_bytes)

PROCESSES: tuple[Confined, ...] = (
    Confined(
        "trial load",
        "a model that a client sent",
        "one process per load",
        _COMPILER_MEMORY,
        f"{_DEFAULTS.trial_seconds:g}, without waits for a CPU, and as much CPU time per core "
        f"(`trial_seconds`); {trial.CLOCK_TIMES * _DEFAULTS.trial_seconds:g} of elapsed time",
        f"{trial.OPEN_FILES} open files, written files up to {trial.FILE_BYTES // _GIB} GiB each; "
        "no core dump",
        "runtime/trial.py",
    ),
    Confined(
        "compilation, proof",
        "the computation of a model",
        "compiler processes for the CPU",
        f"{_COMPILER_MEMORY}, also for resident memory",
        f"{_DEFAULTS.load_seconds:g} per program (`load_seconds`)",
        _COMPILER_FILES,
        "runtime/programs/compilers/child.py",
    ),
    Confined(
        "trial of rows, first execution",
        "a computation with loops, and its parameters",
        "compiler processes; with `compile_processes` 0, a process that exits when idle",
        f"{_COMPILER_MEMORY}, also for resident memory",
        f"{_DEFAULTS.trial_seconds:g} of CPU time (`trial_seconds`), "
        "for the first execution as much per core",
        _COMPILER_FILES,
        "runtime/programs/trials.py",
    ),
    Confined(
        "trial at export",
        "an author's function with loops",
        "a child process of the export",
        f"{trials.MEMORY_BYTES // _GIB} GiB beyond its startup memory, also for resident memory",
        f"{trials.SECONDS:g} of CPU time (`trial_seconds` of the export)",
        _COMPILER_FILES,
        "runtime/programs/trials.py",
    ),
    Confined(
        "compilation for a target",
        "models passed to `plan`, `warm` and `export --target`",
        "child processes of the command",
        f"{compiling.MAX_BYTES // _GIB} GiB of resident memory",
        f"{compiling.JOB_SECONDS:g} per version",
        _NONE,
        "offline/targets/compiling.py",
    ),
    Confined(
        "chat template",
        "the template of a model, with a client's messages",
        f"one process per model{_TURNS}",
        f"{_TEXT_MEMORY}{_answer(_TEXTS.template)}",
        f"{_seconds(_TEXTS.template, 'template')} of elapsed time",
        "none",
        "language/template_process.py",
    ),
    Confined(
        "grammar",
        "JSON schemas, regular expressions and Lark grammars of clients",
        f"one process per model, whose fork compiles; then a thread of the model{_TURNS}",
        f"{_TEXT_MEMORY}{_answer(_TEXTS.grammar)}; "
        f"{grammars.MOST_KNOWN} cached results; "
        f"{grammars.LIMITS['max_grammar_size']} rules, "
        f"{grammars.MOST_STATES} states",
        f"{_seconds(_TEXTS.grammar, 'grammar')} of elapsed time; "
        f"{grammars.STEP_SECONDS:g} of CPU time per step, plus {grammars.MOST_STEPS_SECONDS:g} "
        "in total",
        "none",
        "language/grammars.py",
    ),
    Confined(
        "tokenizer",
        "a tokenizer.json that may be slow, with its regular expressions; a client's text",
        f"one process per model, whose fork tokenizes{_TURNS}",
        f"{_TEXT_MEMORY}"
        f"{_answer(_TEXTS.tokenizer)}; texts of {tokenizing.MOST_CHARACTERS} characters",
        f"{_seconds(_TEXTS.tokenizer, 'tokenizer')} of elapsed time",
        "none",
        "language/tokenizer_process.py",
    ),
    Confined(
        "Python model",
        "the operator's code, with a client's tensors",
        "one process per replica, if the model is configured to use one",
        f"{_DEFAULTS.python_process_bytes or _NONE} (`python_process_bytes`)",
        f"{_DEFAULTS.python_process_seconds:g} without a message (`python_process_seconds`)",
        _NONE,
        "python_models/process/running.py",
    ),
)
"""Work in processes that a parent or the system kills at their limits."""

TEXTS: tuple[Confined, ...] = (
    Confined(
        "symbolic dimensions",
        "model.json, files of `jax.export`",
        "the thread of the load",
        f"{dimensions.MAX_TERMS} terms, {dimensions.MAX_BITS} bits",
        f"bounded by {dimensions.MAX_CHARACTERS} characters per shape, "
        f"{dimensions.MAX_TERMS_OF_ALL} terms per artifact",
        "none",
        "artifact/dimensions.py",
    ),
    Confined(
        "conditions on sizes",
        ".pt2 files",
        "the thread of the load",
        f"{guards.MAX_BITS} bits per number",
        f"bounded by {guards.MAX_CHARACTERS} characters",
        "none",
        "importers/pt2/guards.py",
    ),
    Confined(
        "manifest",
        "model.json",
        "the thread of the load",
        f"{manifest.LIMIT_BYTES // _MIB} MiB of text",
        "bounded by its size",
        "one",
        "artifact/manifest.py",
    ),
    Confined(
        "configuration",
        "config.pbtxt, config.json, `config` of a load",
        "the thread of the load",
        f"{config_text.LIMIT_BYTES // _MIB} MiB of text, nesting",
        "bounded by its size",
        "one",
        "model_config/text.py",
    ),
    Confined(
        "header of parameters",
        "*.safetensors",
        "the thread of the load",
        f"{weights.MAX_HEADER_BYTES // _MIB} MiB of text, {weights.MAX_TENSORS} tensors",
        "bounded by its size",
        "one",
        "artifact/weights.py",
    ),
    Confined(
        "artifact",
        "StableHLO, files of `jax.export`",
        "the thread of the load; after a trial load if a client sent it",
        f"{sizes.LIMIT_ARTIFACT_BYTES // _MIB} MiB",
        "bounded by its size",
        "one",
        "artifact/artifact.py",
    ),
    Confined(
        "program of PyTorch",
        ".pt2 files",
        "the thread of the load",
        f"{archive.MAX_PROGRAM_BYTES // _MIB} MiB of JSON",
        "bounded by its size",
        "one",
        "importers/pt2/archive.py",
    ),
    Confined(
        "generator",
        "generator.json",
        "the thread of the load",
        f"{record.LIMIT_BYTES // _MIB} MiB of text",
        "bounded by its size",
        "one",
        "artifact/generator_record.py",
    ),
    Confined(
        "quick tokenizer",
        "a tokenizer.json proved to take linear time; a client's text",
        "the library `tokenizers`, in threads of the server, scheduled fairly between models",
        f"a file of {files.LIMITS[files.TOKENIZER] // _MIB} MiB, texts that grow at most "
        f"{linear.MOST_GROWTH}-fold",
        f"bounded by {tokenizing.MOST_CHARACTERS} characters",
        "one",
        "language/linear.py",
    ),
)
"""Texts and files whose size or complexity is limited before a library evaluates them."""

EXECUTIONS: tuple[Confined, ...] = (
    Confined(
        "warm-up, samples of `model_warmup`",
        "a model",
        "the thread of the load; models with loops are first executed in another process",
        "the predicted size",
        f"{_DEFAULTS.load_seconds:g} (`load_seconds`), then the thread is abandoned",
        "none",
        "residence/load_runner.py",
    ),
    Confined(
        "second net below a proof",
        "a model without loops",
        "the thread of the load",
        "that of its largest batches",
        f"{second_net.MAX_SECONDS:g}, estimated from the warm-up",
        "none",
        "runtime/programs/second_net.py",
    ),
    Confined(
        "comparison with onnxruntime",
        "an ONNX file that an operator imports",
        "the operator's command",
        f"{checking.MEMORY_BYTES // _GIB} GiB more than before, checked between operators",
        f"{checking.SECONDS:g} per execution, checked between operators; parsing executes nothing",
        "a temporary directory",
        "importers/onnx/checking.py",
    ),
)
"""Executions besides requests that do not have a process of their own."""
