"""Wraps a model to serve sequences: supplies controls and states."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType

import numpy as np

from xlaserve.errors import InvalidModel, InvalidParameter
from xlaserve.files.roots import Roots
from xlaserve.model_config.sequence_batching import Control, ControlKind, SequenceBatching, State
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.handling import Handling
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import Generating, InFlight, LoadedModel, ModelInfo, Stage, Value
from xlaserve.runtime.sequential import SequenceId, Step
from xlaserve.runtime.wrappers.around import AroundModel
from xlaserve.runtime.wrappers.states import States
from xlaserve.tensors import BYTES, Tensor, TensorSpec, describe

INITIAL_STATE = "initial_state"
"""Directory of initial states, next to the version directories."""


class SequenceModel(AroundModel):
    """A model that hides its controls and states from clients (a SequentialModel)."""

    on_demand = None
    """Disabled: compiling on demand would stall a sequence between two requests."""

    def __init__(
        self,
        model: str,
        inner: LoadedModel,
        batching: SequenceBatching,
        states: States | None,
        slots: int,
        *,
        listed: Sequence[str] = (),
    ) -> None:
        """`listed` are the outputs in the configuration; clients also get states listed there."""
        self.batching = batching
        self.slots = slots
        self.replicas = inner.replicas
        self.dispatching = inner.dispatching
        self._model = model
        self._inner = inner
        self._states = states
        self.handling = inner if isinstance(inner, Handling) else None
        hidden = {control.name for control in batching.controls}
        hidden |= {state.input_name for state in batching.states}
        kept = {state.output_name for state in batching.states}.difference(listed)
        self._inputs = tuple(spec for spec in inner.info.inputs if spec.name not in hidden)
        self._outputs = tuple(spec for spec in inner.info.outputs if spec.name not in kept)
        names = [spec.name for spec in inner.info.outputs]
        self._shown = {spec.name: names.index(spec.name) for spec in self._outputs}
        self._is_batched = bool(inner.info.max_batch_size)
        self._info_of: tuple[ModelInfo, ModelInfo] | None = None

    @property
    def info(self) -> ModelInfo:
        """Return the description that clients see; its memory includes the states."""
        inner = self._inner.info
        if self._info_of is None or self._info_of[0] is not inner:
            self._info_of = inner, self._described(inner)
        return self._info_of[1]

    def _described(self, inner: ModelInfo) -> ModelInfo:
        memory = inner.memory
        if self._states is not None:
            states, programs = self._states.bytes_per_device, self._states.programs_per_device
            held = dict(memory.per_device)
            for name in states:
                held[name] = held.get(name, 0) + states[name] + programs[name]
            memory = replace(
                memory,
                states_bytes=sum(states.values()),
                executables_bytes=memory.executables_bytes + sum(programs.values()),
                per_device=MappingProxyType(held) if memory.per_device else memory.per_device,
            )
        return replace(
            inner, inputs=self._inputs, outputs=self._outputs, memory=memory, has_sequences=True
        )

    @property
    def batch_limit(self) -> int:
        """Return the maximum number of sequences per batch, or 0 if rows are dependent."""
        return self._inner.batch_limit

    def expected_seconds(self, rows: int) -> float:
        """Return the warm-up's time, excluding access to states."""
        return self._inner.expected_seconds(rows)

    def padded_rows(self, rows: int) -> int:
        """Return the smallest bucket with state programs that holds this many rows."""
        size = self._inner.padded_rows(rows)
        return size if self._states is None else self._states.prepared(size)

    # --- steps ---

    def check_id(self, sequence: SequenceId) -> None:
        """Raise InvalidParameter for a sequence id that the CORRID control cannot represent."""
        for control in self.batching.controls:
            if control.kind is ControlKind.CORRID and control.datatype is not BYTES:
                limits = np.iinfo(control.datatype.dtype)
                if isinstance(sequence, str) or not limits.min <= sequence <= limits.max:
                    raise InvalidParameter(
                        "sequence_id",
                        f"an integer of 1 to {limits.max}, since the control '{control.name}' of "
                        f"model '{self._model}' is {control.datatype}",
                        repr(sequence)[:80],
                    )

    def step(
        self, inputs: Mapping[str, Value], steps: Sequence[Step], *, replica: int = 0
    ) -> Mapping[str, Tensor]:
        """Execute one step of several sequences, one row per sequence. Blocks."""
        values = {**inputs, **self.controls(steps)}
        if self._states is not None:
            return self._states.step(values, steps, replica, self._shown)
        outputs = self._inner.execute(values, replica=replica)
        return {name: _on_host(outputs[name]) for name in self._shown}

    def dispatch_step(
        self, inputs: Mapping[str, Value], steps: Sequence[Step], *, replica: int = 0
    ) -> InFlight:
        """Start a step on an accelerator."""
        values = {**inputs, **self.controls(steps)}
        if self._states is not None:
            return self._states.dispatch(values, steps, replica, self._shown)
        assert self._inner.dispatching is not None
        return self._inner.dispatching.dispatch(values, replica=replica)

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Execute one row as a whole sequence in the first slot."""
        return self.step(inputs, [Step(0, is_start=True, is_end=True)], replica=replica)

    def controls(self, steps: Sequence[Step]) -> dict[str, Tensor]:
        """Return the inputs that carry sequence controls."""
        found = {}
        for control in self.batching.controls:
            values = _values(control, steps)
            # One element per row; without a batch dimension, there is only one row.
            found[control.name] = values.reshape(-1, 1) if self._is_batched else values
        return found

    # --- the rest of a loaded model ---

    def prepare(self) -> None:
        """Compile the programs that read and write states, for every batch size."""
        if self._states is not None:
            sizes = {bucket.rows for bucket in self._inner.info.buckets if bucket.rows}
            for rows in sorted(sizes) if self._inner.batch_limit else [1]:
                self._states.prepare(rows)
            self._info_of = None

    def compile_rest(
        self,
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        """Compile and warm the programs that the load deferred. Blocks."""
        super().compile_rest(check_cancelled, on_stage)
        self.prepare()

    def close(self) -> None:
        """Release the states and the model."""
        if self._states is not None:
            self._states.clear()
        super().close()


def wrap(inner: LoadedModel, directory: Path, context: LoadContext) -> SequenceModel:
    """Wrap a loaded model to serve sequences; raises InvalidModel."""
    batching = context.config.sequence_batching
    assert batching is not None
    try:
        return _wrapped(inner, batching, directory, context)
    except BaseException:
        inner.close()
        raise


def _wrapped(
    inner: LoadedModel, batching: SequenceBatching, directory: Path, context: LoadContext
) -> SequenceModel:
    if batching.is_iterative and not isinstance(inner, Handling):
        raise InvalidModel(
            "sequence_batching.iterative_sequence: only available for Python models; export a JAX"
            " model with export_stream instead"
        )
    is_decoupled = isinstance(inner, Handling) and inner.is_decoupled
    if isinstance(inner, Generating) or (is_decoupled and not batching.is_iterative):
        raise InvalidModel(
            "sequence_batching: a model with several answers per request supports only iterative"
            " sequences"
        )
    info = inner.info
    _check(batching, info)
    _check_compiled(inner)
    slots = batching.slots(info.max_batch_size)
    if slots > context.max_sequences:
        raise InvalidModel(
            f"sequence_batching: {slots} concurrent sequences requested, expected at most"
            f" {context.max_sequences} (max_sequences_per_model)"
        )
    states = None
    if batching.states:
        if not isinstance(inner, JaxExportModel):
            raise InvalidModel(
                f"sequence_batching.state: a model of the kind '{info.platform}' keeps its own"
                " state, by the control CONTROL_SEQUENCE_CORRID"
            )
        initials = [_initial(state, directory, context.roots) for state in batching.states]
        states = States(
            context.model,
            inner,
            batching.states,
            initials,
            slots,
            is_batched=bool(info.max_batch_size),
            options=context.compilation.options,
            admit=partial(context.mappings.admit, context.model),
        )
    listed = [tensor.name for tensor in context.config.outputs]
    model = SequenceModel(context.model, inner, batching, states, slots, listed=listed)
    for kind, specs in (("input", model.info.inputs), ("output", model.info.outputs)):
        if not specs:
            raise InvalidModel(f"sequence_batching leaves no {kind} for clients")
    context.check_cancelled()
    model.prepare()
    return model


def _check(batching: SequenceBatching, info: ModelInfo) -> None:
    """Raise InvalidModel unless the model has the controls and states, with correct shapes."""
    lead = (-1,) if info.max_batch_size else ()
    inputs = {spec.name: spec for spec in info.inputs}
    outputs = {spec.name: spec for spec in info.outputs}
    for control in batching.controls:
        wanted = TensorSpec(control.name, control.datatype, (*lead, 1))
        _check_tensor("control", "input", wanted, inputs)
    for state in batching.states:
        shape = (*lead, *state.dims)
        _check_tensor("state", "input", TensorSpec(state.input_name, state.datatype, shape), inputs)
        wanted = TensorSpec(state.output_name, state.datatype, shape)
        _check_tensor("state", "output", wanted, outputs)


def _check_compiled(inner: LoadedModel) -> None:
    """Raise InvalidModel if a request with one row could need a shape that is not compiled."""
    if inner.on_demand is None:
        return
    shapes = {spec.name: tuple(1 if s < 0 else s for s in spec.shape) for spec in inner.info.inputs}
    one = {s.name: np.zeros(shapes[s.name], s.datatype.dtype) for s in inner.info.inputs}
    if inner.info.is_ragged or inner.on_demand.shape_of(one) is not None:
        raise InvalidModel(
            "sequence_batching: expected 1 among batch_sizes and no max_on_demand_shapes, since"
            " no shape is compiled on demand"
        )


def _check_tensor(
    what: str, kind: str, wanted: TensorSpec, there: Mapping[str, TensorSpec]
) -> None:
    spec = there.get(wanted.name)
    if spec is None:
        names = ", ".join(f"'{name}'" for name in there)
        raise InvalidModel(
            f"sequence_batching: {kind} '{wanted.name}' is not in the model, it has {names}"
        )
    if (spec.datatype, spec.shape) != (wanted.datatype, wanted.shape):
        raise InvalidModel(
            f"sequence_batching: {what} '{wanted.name}': expected the model's {kind} to be "
            f"{describe(wanted.datatype, wanted.shape)}, got {spec}"
        )


def _initial(state: State, directory: Path, roots: Roots) -> Tensor:
    """Return a sequence's initial state; raises InvalidModel."""
    if not state.data_file:
        return np.zeros(state.dims, state.datatype.dtype)
    file = directory.parent / INITIAL_STATE / state.data_file
    wanted = state.datatype.itemsize * prod(state.dims)
    try:
        with roots.open(file) as opened:
            data = opened.read(wanted + 1)
    except OSError as error:
        raise InvalidModel(
            f"{INITIAL_STATE}/{state.data_file} cannot be read: {error.strerror}"
        ) from error
    if len(data) != wanted:
        got = f"{len(data)}" if len(data) < wanted else "more"
        raise InvalidModel(
            f"{INITIAL_STATE}/{state.data_file}: expected {wanted} bytes for "
            f"{describe(state.datatype, state.dims)}, got {got}"
        )
    return np.frombuffer(data, state.datatype.dtype).reshape(state.dims)


def _values(control: Control, steps: Sequence[Step]) -> Tensor:
    """Return a control's value for each row; padding rows get no control and the id 0."""
    match control.kind:
        case ControlKind.CORRID if control.datatype is BYTES:
            ids = [str(step.id).encode() if step.is_ready else b"" for step in steps]
            return np.array(ids, object)
        case ControlKind.CORRID:
            return np.array([s.id if s.is_ready else 0 for s in steps], control.datatype.dtype)
        case ControlKind.START:
            flags = [step.is_start and step.is_ready for step in steps]
        case ControlKind.END:
            flags = [step.is_end and step.is_ready for step in steps]
        case ControlKind.READY:
            flags = [step.is_ready and not step.is_expired for step in steps]
    return np.array([control.false_true[one] for one in flags], control.datatype.dtype)


def _on_host(value: Value) -> Tensor:
    return value if isinstance(value, np.ndarray) else value.numpy()
