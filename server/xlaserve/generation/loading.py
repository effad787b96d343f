"""Loads a generator from a version directory."""

# Some jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.export
import numpy as np

from xlaserve.artifact import artifact, weights
from xlaserve.artifact import generator_record as record
from xlaserve.artifact.generator_record import CHUNK, DECODE, WEIGHTS, Record
from xlaserve.artifact.signature import Signature, agreed
from xlaserve.artifact.sizes import LIMIT_ARTIFACT_BYTES
from xlaserve.artifact.written_by import Writer
from xlaserve.errors import InvalidModel, InvalidTensor, UnknownTensor
from xlaserve.errors.language import TooManyTexts
from xlaserve.errors.panics import answerable
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.generation import asking, texts, tools
from xlaserve.generation.constraining import Constraining
from xlaserve.generation.lowering import Lowering, Wanted
from xlaserve.generation.programs import Programs
from xlaserve.generation.running import Running
from xlaserve.generation.slots import Slots
from xlaserve.generation.texts import STOP, Prompts, check_prompt, stops
from xlaserve.generation.trial import rows_are_of_their_tokens, steps_are_alike
from xlaserve.language.files import TOKENIZER
from xlaserve.language.grammars import Grammars
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS, TextLimits
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.devices import placement, sites
from xlaserve.runtime.failures import invalid_model
from xlaserve.runtime.generator import configured
from xlaserve.runtime.generator.counts import GenerationCounts
from xlaserve.runtime.generator.info import TEXT, GenerationInfo
from xlaserve.runtime.handling import ModelRequest
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import NONE_OPTIONAL, ModelInfo, Stage, Value
from xlaserve.runtime.programs.kept_programs import KeptPrograms
from xlaserve.runtime.uncompiled import UncompiledModel
from xlaserve.runtime.waiting import Waiting
from xlaserve.tensors import Tensor, TensorSpec, datatype_named

PLATFORM = "generator"

PROMPT = "tokens"
_INT32, _FP32 = datatype_named("INT32"), datatype_named("FP32")
INPUTS = (TensorSpec(PROMPT, _INT32, (-1,)),)
_TOP = (TensorSpec("top_tokens", _INT32, (-1,)), TensorSpec("top_logprobs", _FP32, (-1,)))
OF_MANY = (TensorSpec("token", _INT32, (1,)), TensorSpec("logprob", _FP32, (1,)), *_TOP)
"""Outputs of each answer, if a request gets one per token."""
OF_ONE = (TensorSpec("tokens", _INT32, (-1,)), TensorSpec("logprobs", _FP32, (-1,)), *_TOP)
"""Outputs of the single answer to a request."""
OUTPUTS = (*OF_MANY[:2], *OF_ONE)

_AHEAD_SLOTS = 4
"""Slots per waiting request that is handed to the generation thread in advance, to start with the
next step. Further requests stay in the station's queue, where priorities and fairness apply.
"""


class GeneratorModel(UncompiledModel):
    """A loaded generator (a LoadedModel, Slotted), which answers with one token at a time."""

    replicas = 1
    batch_limit = 1
    is_batched = False
    is_decoupled = True

    def __init__(
        self,
        context: LoadContext,
        info: ModelInfo,
        generation: GenerationInfo,
        programs: Programs,
        grammars: Grammars | None = None,
    ) -> None:
        name = context.model
        self.info = info
        self.generation = generation
        self.concurrency = generation.slots
        self.ahead = -(-generation.slots // _AHEAD_SLOTS)
        self._batching = context.config.dynamic_batching
        self._name = name
        self._programs = programs
        self._slots = Slots(name, generation, programs)
        text = self._text = generation.text if generation.is_text_offered else None
        """Tokenizer for V2 requests with text; None if the model does not offer text."""
        waiting = context.text_limits.waiting
        self._prompts = Prompts(name, text, generation.max_length, waiting) if text else None
        self._constraining = Constraining(name, grammars, self._slots.add, waiting)

    @property
    def counts(self) -> GenerationCounts:
        """Return the generation counters."""
        return self._slots.counts

    def handle(
        self,
        replica: int,
        requests: Sequence[ModelRequest],
        freed: Callable[[], None],
        *,
        together: bool = True,
    ) -> None:
        """Queue requests for a slot; `freed` is called when the last of them has ended."""
        counted = _Countdown(len(requests), freed)
        for request in requests:
            request.when_cancelled(partial(self._slots.withdraw, request))
            begin = partial(self._begin, request, counted)
            if TEXT in request.inputs and self._prompts is not None:
                try:
                    self._prompts.thread.submit(request.sender.caller, begin)
                except TooManyTexts as error:
                    request.fail(error)
                    counted()
            else:
                begin()

    def _begin(self, request: ModelRequest, freed: Callable[[], None]) -> None:
        """Queue a request for a slot; runs on the tokenizer thread if the prompt is text."""
        try:
            if request.is_cancelled:
                request.end()
                freed()
                return
            self._constraining.add(self._running(request, freed))
        except BaseException as error:
            request.fail(answerable(error))
            freed()

    def _prompt(self, request: ModelRequest) -> Tensor:
        if self._prompts is None:
            value = request.inputs[PROMPT]
        else:
            check_prompt(self._name, request)
            if TEXT in request.inputs:
                return self._prompts.encode(request.inputs[TEXT])
            value = request.inputs[PROMPT]
        return value if isinstance(value, np.ndarray) else value.numpy()

    def _running(self, request: ModelRequest, freed: Callable[[], None]) -> Running:
        tokens = self._prompt(request)
        given = TEXT if TEXT in request.inputs else PROMPT
        vocab, most = self.generation.vocab, self.generation.max_length
        if not 1 <= len(tokens) <= most:
            expected = f"1 to {most} tokens (the model's positions)"
            raise InvalidTensor(self._name, "input", given, expected, f"{len(tokens)}")
        if tokens.min() < 0 or tokens.max() >= vocab:
            got = int(tokens.min() if tokens.min() < 0 else tokens.max())
            expected = f"token ids of 0 to {vocab - 1}"
            raise InvalidTensor(self._name, "input", given, expected, f"{got}")
        parameters = asking.read(request.parameters, self.generation)
        # A copy: the request's memory belongs to the client or to the message.
        prompt = np.array(tokens, np.int32)
        text, stop = self._text, stops(request.parameters.get(STOP), self._text)
        wants_text = text is not None and (stop or TEXT in request.outputs)
        detokenizer = text.detokenizer(stop) if text is not None and wants_text else None
        return Running(request, freed, prompt, parameters, self._level(request), text=detokenizer)

    def text_bytes(self, inputs: Mapping[str, Value]) -> int:
        """Return the memory needed to tokenize a request's text; 0 without text."""
        if TEXT not in inputs or self._prompts is None:
            return 0
        return self._prompts.held_bytes(inputs[TEXT])

    def choose_outputs(
        self, requested: tuple[TensorSpec, ...] | None, *, many: bool
    ) -> tuple[TensorSpec, ...]:
        """Return the requested outputs; raises UnknownTensor."""
        more = () if self._text is None else (texts.SPEC,)
        specs = (*(OF_MANY if many else OF_ONE), *more)
        for spec in requested or ():
            if spec not in specs:
                kind = "output of one of many answers" if many else "output of one answer"
                raise UnknownTensor(self._name, kind, spec.name, [one.name for one in specs])
        return requested or specs

    def yields_to(self, level: int) -> bool:
        """Tell whether a request of a priority level would preempt a running one."""
        return self._slots.yields_to(level)

    def _level(self, request: ModelRequest) -> int:
        """Return the priority of a request; 0 for all if there are no priority levels."""
        if not self._batching.priority_levels:
            return 0
        level = request.parameters.get("priority")
        return level if type(level) is int and level else self._batching.default_priority_level

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Generate one token, for the warm-up. Blocks."""
        waiting = Waiting(self._name, self.info, inputs)
        waiting.request.parameters = {"max_tokens": 1}
        self.handle(replica, [waiting.request], waiting.freed)
        return waiting.result()

    def expected_seconds(self, rows: int) -> float:
        """Return infinity, so that the model never runs on the event loop."""
        return math.inf

    def close(self) -> None:
        """End the threads and subprocesses, and release all arrays and programs."""
        # Stop subprocesses before the threads that may wait for them.
        if self.generation.text is not None:
            self.generation.text.close()
        if self._prompts is not None:
            self._prompts.close()
        self._constraining.close()
        self._slots.close()
        self._programs.close()


class _Countdown:
    """Calls a function after a number of calls; thread-safe."""

    def __init__(self, count: int, over: Callable[[], None]) -> None:
        self._left = iter(range(count - 1, -1, -1))
        self._over = over

    def __call__(self) -> None:
        if not next(self._left):  # next() is atomic: no two threads get the same number
            self._over()


def is_there(directory: Path) -> bool:
    """Tell whether a version directory contains a generator."""
    return (directory / record.FILE_NAME).exists()


@dataclass(frozen=True, slots=True)
class _Read:
    """The contents of a version directory, before compilation."""

    record: Record
    generation: GenerationInfo
    text: texts.LoadedText
    tokenizer: bytearray | None

    @classmethod
    def of(
        cls,
        directory: Path,
        config: ModelConfig,
        model: str,
        roots: Roots,
        limits: TextLimits = DEFAULT_TEXT_LIMITS,
    ) -> "_Read":
        """Read a version directory; raises InvalidModel."""
        found = record.read(directory, roots)
        written = found.files[TOKENIZER].record if TOKENIZER in found.files else None
        tokenizer = texts.read_tokenizer(directory, written, roots)
        text = texts.read(directory, config, model, roots, tokenizer, limits=limits)
        generation = replace(
            configured.read(found, directory, config),
            written_at=int((directory / record.FILE_NAME).stat().st_mtime),
            roots=roots,
            text=text.text,
            no_text=text.no_text,
            is_text_offered=text.is_offered,
            tool_family=tools.family(config, text.text, model),
        )
        return cls(found, generation, text, tokenizer)

    @property
    def host_bytes(self) -> int:
        """Return the host memory of the generator."""
        return configured.host_bytes(self.generation, has_text=self.text.text is not None)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A generator prepared for ahead-of-time compilation, without its parameters."""

    lowering: Lowering
    site: sites.Site
    slots: int
    host_bytes: int

    @classmethod
    def of(
        cls,
        directory: Path,
        config: ModelConfig,
        platform: str,
        present: "Sequence[jax.Device]",  # pyright: ignore[reportInvalidTypeForm]
        roots: Roots = ANYWHERE,
    ) -> "Ahead":
        """Read a version directory for a server with the devices `present`; raises InvalidModel.

        Includes all partial steps and copy programs, since only the trials of a real load can
        exclude them.
        """
        read = _Read.of(directory, config, directory.parent.name, roots)
        if read.text.text is not None:
            read.text.text.close()
        site = _site(config, platform, present)
        _check_rules(directory, read, site, roots)
        entries = {one.name: one for one in weights.read_entries(directory, WEIGHTS, roots)}
        if set(entries) != set(read.record.parameters):
            raise _odd_parameter(entries, read.record)
        shapes = [
            jax.ShapeDtypeStruct(
                entries[name].shape, entries[name].dtype, sharding=site.parameter(name)
            )
            for name in read.record.parameters
        ]
        exported = _exported(directory, read.record, site.platform, roots)
        lowering = Lowering(read.record, read.generation, exported, shapes, site)
        return cls(lowering, site, read.generation.slots, read.host_bytes)

    def sizes(self, wanted: Wanted) -> tuple[int, tuple[int, ...]]:
        """Return the rows of a program, and its window (an empty tuple if it has none)."""
        return wanted.size or self.slots, (wanted.window,) if wanted.window else ()


def load(directory: Path, context: LoadContext) -> GeneratorModel:
    """Load a version directory, compile its programs for the configured sizes, and warm them up.

    Raises InvalidModel, OutOfMemory, or the error of `context.check_cancelled`.
    """
    limits = context.text_limits
    read = _Read.of(directory, context.config, context.model, context.roots, limits)
    text, generation = read.text, read.generation
    more = (texts.SPEC,) if text.is_offered else ()
    inputs, outputs = (*INPUTS, *more), (*OUTPUTS, *more)
    _check_config(context.config, Signature(inputs, outputs, 0))
    site = _site(context.config, context.device)
    grammars = _grammars(read.tokenizer, generation, context.model, limits)
    exported = _exported(directory, read.record, site.platform, context.roots)
    with invalid_model(context.model, record.FILE_NAME):
        _check_rules(directory, read, site, context.roots)
        arrays = _parameters(directory, read.record, context, site)
        kept = KeptPrograms(context.compilation, context.model, context.version)
        programs = Programs(read.record, generation, exported, arrays, site, kept=kept)
        done = 0

        def before_each() -> None:
            nonlocal done
            context.check_cancelled()
            context.mappings.admit(context.model)
            done += 1
            context.on_stage(Stage("compiling", done, programs.count))

        programs.compile(before_each)
        generation = _tried(programs, generation, context)
    memory = programs.memory(read.host_bytes)
    info = ModelInfo(
        PLATFORM,
        inputs,
        outputs,
        0,
        memory,
        compiled_programs=programs.count - programs.cached,
        cached_programs=programs.cached,
        is_decoupled=True,
        takes_parameters=True,
        generation=generation,
        matmul_precision=context.compilation.options.name_for(site.platform),
        # A request has either token ids or a text.
        optional=dict.fromkeys((PROMPT, TEXT)) if text.is_offered else NONE_OPTIONAL,
    )
    return GeneratorModel(context, info, generation, programs, grammars)


def _tried(programs: Programs, generation: GenerationInfo, context: LoadContext) -> GenerationInfo:
    """Run the trials; return the generation settings without features that failed them."""
    if generation.keeps_prefixes and not rows_are_of_their_tokens(programs, generation):
        generation = configured.without_prefixes(generation, context.config, context.model)
        # Partial steps only write back the row of the current position.
        programs.drop_partial("its rows may depend on more than their tokens")
    elif not programs.why_whole and not steps_are_alike(programs, generation):
        programs.drop_partial("a step with fewer rows gave different tokens in a trial")
    if generation.step_sizes and programs.why_whole:
        why = programs.why_whole
        return configured.without_step_sizes(generation, context.config, context.model, why)
    return generation


def _check_config(config: ModelConfig, signature: Signature) -> None:
    """Raise InvalidModel for unknown tensors, and for batching settings."""
    agreed(signature, config)
    if config.max_batch_size:
        raise InvalidModel(
            "max_batch_size: expected none or 0, since generator requests have one prompt, got"
            f" {config.max_batch_size}"
        )
    if config.sequence_batching is not None:
        raise InvalidModel("sequence_batching: not available for generators")


def _grammars(
    tokenizer: bytearray | None, generation: GenerationInfo, model: str, limits: TextLimits
) -> Grammars | None:
    if not generation.has_grammars:
        return None
    if tokenizer is None:
        raise InvalidModel(f"parameter 'grammars': expected a {TOKENIZER} in the version, got none")
    try:
        written = tokenizer.decode()
    except UnicodeDecodeError as error:
        raise InvalidModel(f"{TOKENIZER} is not UTF-8: {error}") from None
    return Grammars(model, written, generation.vocab, generation.stop_tokens, limits.grammar)


def _exported(
    directory: Path, found: Record, platform: str, roots: Roots
) -> "tuple[jax.export.Exported, jax.export.Exported]":
    """Return the exported programs for one token and for a prompt chunk."""

    def one(name: str) -> "jax.export.Exported":
        data = files.read_checked(
            directory,
            name,
            limit_bytes=LIMIT_ARTIFACT_BYTES,
            record=found.files[name].record,
            roots=roots,
        )
        exported = artifact.deserialize(data, Writer.of(found.jax_version).jax, name=name)
        artifact.check_runs(exported, platform, name)
        return exported

    return one(DECODE), one(CHUNK)


def _site(
    config: ModelConfig,
    platform: str,
    present: "Sequence[jax.Device] | None" = None,  # pyright: ignore[reportInvalidTypeForm]
) -> sites.Site:
    """Return the device or mesh of a generator; raises InvalidModel for more than one instance."""
    wanted = placement.read(config, platform)
    # On a server with GPUs, the model may be placed on the CPU.
    layout = sites.layout(wanted, present if wanted.platform == platform else None)
    if len(layout.replicas) != 1:
        raise InvalidModel(
            "instance_group: expected one instance, on one device or split over several "
            '(placement "shard"), since all slots share one cache, got '
            f"{len(layout.replicas)}"
        )
    return layout.sites[0]


def _check_rules(directory: Path, read: _Read, site: sites.Site, roots: Roots) -> None:
    """Raise InvalidModel unless all partition rules split parameters or cache arrays evenly."""
    if not site.rules:
        return
    shapes = {entry.name: entry.shape for entry in weights.read_entries(directory, WEIGHTS, roots)}
    for index, array in enumerate(read.record.cache):
        name = configured.cache_name(index)
        if name in shapes:
            raise InvalidModel(f"partition: parameter '{name}' has the name of a cache")
        shapes[name] = array.sized(read.generation.slots, read.generation.max_length)
    site.check(shapes)


def _parameters(
    directory: Path, found: Record, context: LoadContext, site: sites.Site
) -> list[jax.Array]:
    placed: dict[str, jax.Array] = {}
    record_of = found.files[WEIGHTS].record
    for name, tensor in weights.read(directory, WEIGHTS, record_of, context.roots):
        context.check_cancelled()
        placed[name] = jax.device_put(tensor, site.parameter(name))
    if set(placed) != set(found.parameters):
        raise _odd_parameter(placed, found)
    return [placed[name] for name in found.parameters]


def _odd_parameter(names: Collection[str], found: Record) -> InvalidModel:
    odd = min(set(names) ^ set(found.parameters))
    return InvalidModel(f"parameter '{odd}' is not in both {WEIGHTS} and {record.FILE_NAME}")
