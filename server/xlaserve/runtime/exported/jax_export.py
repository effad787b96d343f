"""Models exported by `jax.export`, compiled for every batch size bucket."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import structlog
from jax.errors import JaxRuntimeError

from xlaserve.artifact import manifest, shapes
from xlaserve.artifact.artifact import Keyed
from xlaserve.artifact.shapes import OpenDimensions
from xlaserve.artifact.signature import Signature
from xlaserve.errors import InvalidTensor
from xlaserve.model_config import buckets
from xlaserve.model_config.buckets import FIXED, BucketPlan
from xlaserve.row_proofs import neighbours
from xlaserve.row_proofs.verdict import Verdict
from xlaserve.runtime.devices import sites
from xlaserve.runtime.devices.device_parameters import DeviceParameters
from xlaserve.runtime.devices.sites import Layout, Site
from xlaserve.runtime.embedding.described import describe
from xlaserve.runtime.embedding.info import EmbeddingInfo
from xlaserve.runtime.exported import version_files
from xlaserve.runtime.exported.outputs import DeviceTensor, JaxInFlight, left_there, to_host
from xlaserve.runtime.exported.stepped import SteppedModel, max_steps
from xlaserve.runtime.exported.stepped_rows import SteppedRows
from xlaserve.runtime.failures import invalid_model, raise_if_exhausted
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import ModelInfo, Stage, Value
from xlaserve.runtime.programs import trials
from xlaserve.runtime.programs.compile_plan import CompilePlan
from xlaserve.runtime.programs.executables import Executables, packed
from xlaserve.runtime.programs.on_demand import OnDemandShapes
from xlaserve.runtime.programs.program_table import (
    Arrays,
    Copy,
    Program,
    Table,
    bucket_shape,
    copies_of,
)
from xlaserve.runtime.programs.programs import Compiler
from xlaserve.runtime.programs.proving import Prover
from xlaserve.runtime.programs.second_net import ContradictionError, Net
from xlaserve.runtime.programs.shared_programs import Lease
from xlaserve.runtime.programs.stock import Stock
from xlaserve.runtime.programs.trials import Outcome, Subject, refused_proof
from xlaserve.runtime.wrappers import optional_inputs
from xlaserve.tensors import Shape, Tensor, TensorSpec

PLATFORM = "jax_export"

_log = structlog.get_logger("loading")

_LETTING_GO_SECONDS, _POLL_SECONDS = 1.0, 0.001


class JaxExportModel:
    """A loaded exported model. Any number of threads may execute it."""

    def __init__(
        self,
        model: str,
        info: ModelInfo,
        copies: Sequence[Copy],
        replicas: Sequence[int],
        parameters: DeviceParameters,
        *,
        lease: Lease,
    ) -> None:
        self.info = info
        self.replicas = len(replicas)
        self.batch_limit = 0
        self.on_demand: OnDemandShapes | None = None
        self._model = model
        self._copies = tuple(copies)
        self._by_replica = tuple(copies[index] for index in replicas)
        self._host = parameters.host
        self._batched = bool(info.max_batch_size)
        self._most_rows = info.max_batch_size
        self._independent = True
        self._dimensions: OpenDimensions | None = None
        self._names = tuple(spec.name for spec in info.inputs)
        self._output_names = tuple(spec.name for spec in info.outputs)
        self._is_accelerated = copies[0].site.is_accelerator
        self.queues = tuple(copy.site.queue for copy in self._by_replica)
        """Queue of each replica, used for dispatched execution."""
        self._stock = Stock(model, info, copies, lease, self._take)

    def execute(
        self,
        inputs: Mapping[str, Value],
        *,
        resident: bool = False,
        replica: int = 0,
        programs: Sequence[Program] | None = None,
    ) -> Mapping[str, Value]:
        """Run the smallest bucket that fits the rows, padded by repeating the last row.

        `programs`, if given, has one program per copy of the model to run instead of the bucket's.
        With `resident`, outputs stay on the device, as DeviceTensors. Raises OutOfMemory.
        """
        if self._is_accelerated:
            return self.dispatch(
                inputs, resident=resident, replica=replica, programs=programs
            ).fetch()
        if programs is None and not resident:
            copy = self._by_replica[replica]
            if copy.may_split and (pieces := self._pieces(copy, inputs)) is not None:
                return self._joined(copy, *pieces)
        try:
            outputs, arguments, rows, padded = self.called(inputs, replica, programs)
            if resident:
                shown = left_there(self._model, outputs, arguments, rows)
                return dict(zip(self._output_names, shown, strict=True))
            hosts = [to_host(output) for output in outputs]
        except (JaxRuntimeError, MemoryError) as error:
            raise_if_exhausted(self._model, error)
            raise
        if padded:
            hosts = [host[:rows] for host in hosts]
        names = self._output_names
        if len(names) == 1:
            return {names[0]: hosts[0]}  # Five times as fast as the general path.
        return dict(zip(names, hosts, strict=True))

    def _pieces(
        self, copy: Copy, inputs: Mapping[str, Value]
    ) -> tuple[Sequence[Program], list[Tensor], int] | None:
        """Split a batch into pieces: return their programs, the tensors and the number of rows.

        Returns None if the batch should be executed whole.
        """
        if self._dimensions is None and not copy.table.may_gain:
            return None
        values = [inputs[name] for name in self._names]
        rows = self.rows(values)
        table = copy.table if self._dimensions is None else self._sized(copy, values)
        if rows is None or len(pieces := table.pieces_for(rows)) == 1:
            return None
        hosts = [value if isinstance(value, np.ndarray) else value.numpy() for value in values]
        return pieces, hosts, rows

    def _joined(
        self, copy: Copy, pieces: Sequence[Program], tensors: Sequence[Tensor], rows: int
    ) -> Mapping[str, Value]:
        """Execute a batch in pieces, and concatenate their outputs."""
        found: list[list[Tensor]] = []
        start = 0
        try:
            for program in pieces:
                end = min(start + program.rows, rows)
                arguments: Arrays = [
                    shapes.padded(tensor[start:end], program.rows)
                    if end - start < program.rows
                    else tensor[start:end]
                    for tensor in tensors
                ]
                outputs = program.call(copy.leaves, arguments)
                found.append([to_host(output, end - start) for output in outputs])
                start = end
            joined = [np.concatenate(parts) for parts in zip(*found, strict=True)]
        except (JaxRuntimeError, MemoryError) as error:
            raise_if_exhausted(self._model, error)
            raise
        return dict(zip(self._output_names, joined, strict=True))

    @property
    def dispatching(self) -> "JaxExportModel | None":
        """Return the model itself on accelerators, otherwise None."""
        return self if self._is_accelerated else None

    def dispatch(
        self,
        inputs: Mapping[str, Value],
        *,
        resident: bool = False,
        replica: int = 0,
        programs: Sequence[Program] | None = None,
    ) -> "JaxInFlight":
        """Start an execution: copies to the device, the computation, copies to the host.

        Raises OutOfMemory.
        """
        try:
            outputs, arguments, rows, padded = self.called(inputs, replica, programs)
            if not resident:
                for output in outputs:
                    output.copy_to_host_async()
        except (JaxRuntimeError, MemoryError) as error:
            raise_if_exhausted(self._model, error)
            raise
        kept = rows if resident or padded else None
        return JaxInFlight(self._model, self._output_names, outputs, arguments, kept, resident)

    def called(
        self, inputs: Mapping[str, Value], replica: int, programs: Sequence[Program] | None
    ) -> tuple[list[jax.Array], Arrays, int | None, bool]:
        """Call a program; return outputs, arguments to keep alive, rows, and whether it padded.

        Raises XLA's errors.
        """
        copy = self._by_replica[replica]
        values = [inputs[name] for name in self._names]
        rows = self.rows(values)
        if programs is None:
            table = copy.table if self._dimensions is None else self._sized(copy, values)
            program = table.program_for(rows or 0)
        else:
            program = programs[self._copies.index(copy)]
        padded = rows is not None and rows != program.rows
        arguments: Arrays = values  # type: ignore[assignment]
        for value in values:
            if padded or type(value) is not np.ndarray:
                arguments = self._arguments(copy, values, program.rows)
                break
        if copy.site.launching is None:
            return program.call(copy.leaves, arguments), arguments, rows, padded
        with copy.site.launching:
            return program.call(copy.leaves, arguments), arguments, rows, padded

    def site_of(self, replica: int) -> Site:
        """Return a replica's site."""
        return self._by_replica[replica].site

    def expected_seconds(self, rows: int) -> float:
        """Return the warm-up's measurement of the bucket for this number of rows."""
        return sum(piece.seconds for piece in self._copies[0].table.pieces_for(rows))

    def padded_rows(self, rows: int) -> int:
        """Return the bucket size for this many rows, or `rows` if batches are split or unpadded."""
        if not self._batched:
            return rows
        first, *more = self._copies[0].table.pieces_for(rows)
        return rows if more else first.rows

    def start(
        self,
        compiler: Compiler,
        plan: BucketPlan,
        dimensions: OpenDimensions,
        context: LoadContext,
    ) -> None:
        """Compile the programs that the first request needs; the rest now or in the background."""
        self._independent = plan.independent
        self._batched = plan.is_batched
        self._dimensions = dimensions if dimensions.places else None
        wanted = buckets.may_split(context.config)
        for copy in self._copies:
            is_alone = len(copy.site.devices) == 1 and not copy.site.is_accelerator
            copy.may_split = wanted and is_alone and plan.independent and plan.is_batched
        most = context.max_on_demand_shapes
        limit = shapes.on_demand(context.config, most, exact=dimensions.has_rows)
        if limit:
            self.on_demand = OnDemandShapes(
                self._model,
                self,
                self._stock,
                self.info.inputs,
                buckets=plan.sizes,
                dimensions=dimensions,
                limit=limit,
            )
        self._stock.start(compiler, plan, dimensions, context, on_demand=self.on_demand)

    def _take(self, info: ModelInfo) -> None:
        """Update the description. Called for each newly compiled program."""
        self.info = info
        if self._batched and self._independent and self.on_demand is None:
            # All requests of a batch have the same sizes. Use the limit for the largest sizes:
            # these gain least from batching and need most memory.
            self.batch_limit = self._copies[0].table.batch_limit()

    @property
    def next_bucket_bytes(self) -> Mapping[str, int]:
        """Return an upper bound of the memory, per device, of the next bucket to compile."""
        return self._stock.next_bucket_bytes

    def compile_rest(
        self,
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        """Compile and warm the remaining buckets, one after the other."""
        self._stock.compile_rest(check_cancelled, on_stage)

    def stop(self) -> None:
        """Stop background compilation at its next step."""
        self._stock.stop()

    def close(self) -> None:
        """Release parameters and executables; return once the parameters' memory is free.

        Waits for a bucket that is being compiled. XLA frees memory on its own threads, and JAX
        releases it with the next garbage collection. Waits at most a second for memory that an
        output still holds.
        """
        self._stock.close()
        deadline = time.monotonic() + _LETTING_GO_SECONDS
        while any(memory() is not None for memory in self._host) and time.monotonic() < deadline:
            gc.collect(0)
            time.sleep(_POLL_SECONDS)

    def rows(self, values: Sequence[Value]) -> int | None:
        """Return the rows of a request; None without a batch dimension.

        Raises InvalidTensor unless all inputs have the same number of rows.
        """
        if not self._batched:
            return None
        first = values[0]
        rows = len(first) if type(first) is np.ndarray else _rows(first)
        if rows > self._most_rows or len(values) > 1:
            self._check_rows(values, rows)
        return rows

    def _check_rows(self, values: Sequence[Value], rows: int) -> None:
        for spec, value in zip(self.info.inputs, values, strict=True):
            if (found := _rows(value)) != rows or found > self._most_rows:
                expected = f"a batch of {min(rows, self._most_rows)} rows"
                raise InvalidTensor(self._model, "input", spec.name, expected, f"{found} rows")

    def _sized(self, copy: Copy, values: list[Value]) -> Table:
        """Return the program table for a request's sizes; moves `values` to the host."""
        specs = self.info.inputs
        tensors = [value if isinstance(value, np.ndarray) else value.numpy() for value in values]
        values[:] = tensors
        assert self._dimensions is not None
        return copy.tables[self._dimensions.sizes_of(self._model, specs, tensors)]

    def _arguments(self, copy: Copy, values: Sequence[Value], bucket: int) -> Arrays:
        return [
            self._argument(copy, spec, value, bucket)
            for spec, value in zip(self.info.inputs, values, strict=True)
        ]

    def _argument(
        self, copy: Copy, spec: TensorSpec, value: Value, bucket: int
    ) -> "jax.Array | Tensor":
        if isinstance(value, DeviceTensor) and _takes(copy, spec, value.array, bucket):
            return value.array
        host = value if isinstance(value, np.ndarray) else value.numpy()
        return host if bucket == FIXED or len(host) == bucket else shapes.padded(host, bucket)


def load(directory: Path, context: LoadContext) -> JaxExportModel | SteppedModel | SteppedRows:
    """Load, compile and warm a version directory. Call `jax_runtime.start` first.

    Raises InvalidModel, OutOfMemory, or the exception of `context.check_cancelled`.
    """
    known = context.programs.known
    version = version_files.read(directory, context.config, context.device, context.roots, known)
    assert version.described is not None
    layout = sites.layout(version.placement)
    version.check_layout(layout)
    steps = version.described.steps
    most = 0 if steps is None else max_steps(steps, version.config)
    with invalid_model(context.model, manifest.ARTIFACT):
        parameters = DeviceParameters.read(
            directory,
            version.described,
            layout.sites,
            context.check_cancelled,
            mapped=context.mmap_parameters,
            processes=context.processes,
            roots=context.roots,
        )
        context = replace(context, config=version.config)
        model = compiled(version.computation, parameters, version.signature, layout, context)
    if steps is None:
        return model
    if not version.signature.is_open:
        return SteppedModel(context.model, model, steps, most)
    admit = partial(context.mappings.admit, context.model)
    return SteppedRows(context, model, steps, most, admit)


def compiled(
    computation: Keyed,
    parameters: DeviceParameters,
    signature: Signature,
    layout: Layout,
    context: LoadContext,
) -> JaxExportModel:
    """Compile and warm an artifact whose arguments are its parameters, then its inputs.

    Shares the programs of other models with the same computation.
    """
    # Copy: a lease removes the module from its argument once nothing is left to compile.
    spare = replace(computation.exported)
    lease = context.programs.lease(computation.key, computation.exported, computation.file_hash)
    try:
        return _compiled(lease, parameters, signature, layout, context)
    except ContradictionError as found:
        lease.release()
        difference = found.difference
    except BaseException:
        lease.release()
        raise
    lease = context.programs.lease(computation.key, spare, computation.file_hash)
    try:
        refuse = partial(
            refused_proof,
            difference=difference,
            model=context.model,
            version=context.version,
        )
        return _compiled(lease, parameters, signature, layout, context, refuse=refuse)
    except BaseException:
        lease.release()
        raise


def _compiled(
    lease: Lease,
    parameters: DeviceParameters,
    signature: Signature,
    layout: Layout,
    context: LoadContext,
    *,
    refuse: Callable[[Verdict], Verdict] | None = None,
) -> JaxExportModel:
    """Compile a model; `refuse` changes the proof's verdict. Raises ContradictionError."""
    copies = copies_of(layout, parameters)
    admit = partial(context.mappings.admit, context.model)
    executables = Executables(
        lease, parameters.packing, context.compilation, context.model, context.version
    )

    def subject(dimensions: OpenDimensions) -> Subject:
        sizes = next(iter(dimensions.combinations), ())
        inputs = dimensions.specs(signature.inputs, sizes) if sizes else signature.inputs
        return Subject(
            context.model,
            lease.key,
            replace(lease.exported),
            inputs,
            signature.outputs,
            copies[0].leaves,
            packed(parameters.packing),
        )

    def find_difference(tried: OpenDimensions) -> neighbours.Difference | None:
        return _find_difference(subject(tried), compiler_of(tried), tried, context)

    def compiler_of(tried: OpenDimensions) -> Compiler:
        return Compiler(lease, executables, signature, copies, tried, admit=admit)

    prover = Prover(
        copies[0].site,
        context.compilation,
        context.model,
        is_niced=not lease.is_alone,
        check_cancelled=context.check_cancelled,
        on_stage=context.on_stage,
    )
    plan = CompilePlan.of(lease, signature, context.config, prover, find_difference, refuse=refuse)
    net = Net(
        subject(plan.dimensions),
        lease,
        copies[0],
        context.compilation,
        plan.is_proved and plan.buckets.is_batched and plan.buckets.independent,
        context.check_cancelled,
    )
    net.check_ends(_first_shapes(plan, signature))
    info = ModelInfo(
        PLATFORM,
        signature.inputs,
        signature.outputs,
        plan.rows.max_batch_size,
        loops_follow_inputs=plan.loops_follow_inputs,
        verdict=plan.verdict,
        training=plan.training,
        notice=plan.rows.notice,
        optional=optional_inputs.of_computation(context.config),
        embedding=_embedding(signature, plan.dimensions, context),
        matmul_precision=context.compilation.options.name_for(copies[0].site.platform),
    )
    compiler = Compiler(
        lease,
        executables,
        signature,
        copies,
        plan.dimensions,
        is_measured=not plan.loops_follow_inputs,
        admit=admit,
    )
    model = JaxExportModel(context.model, info, copies, layout.replicas, parameters, lease=lease)
    model.start(compiler, plan.buckets, plan.dimensions, context)
    if plan.dimensions.combinations:
        net.check(copies[0].tables[plan.dimensions.combinations[0]].programs)
    return model


def _first_shapes(plan: CompilePlan, signature: Signature) -> list[Shape]:
    """Return the input shapes of the first warm-up execution, or none without warm-up."""
    if plan.loops_follow_inputs or not plan.dimensions.combinations:
        return []
    specs = plan.dimensions.specs(signature.inputs, plan.dimensions.combinations[0])
    return [bucket_shape(spec, plan.buckets.sizes[0]) for spec in specs]


def _embedding(
    signature: Signature, dimensions: OpenDimensions, context: LoadContext
) -> EmbeddingInfo | None:
    """Describe a declared embedding model; raises InvalidModel."""
    if context.embedding is None:
        return None
    on_demand = shapes.on_demand(context.config) > 0
    return describe(context.embedding, signature, dimensions, on_demand=on_demand)


def _find_difference(
    subject: Subject, compiler: Compiler, tried: OpenDimensions, context: LoadContext
) -> neighbours.Difference | None:
    """Test whether rows depend on other rows of their batch, at one size per other dimension.

    An incomplete test is only logged: the author's declaration is trusted in that case.
    """
    compilation, check_cancelled = context.compilation, context.check_cancelled
    context.on_stage(Stage("trying"))
    if compilation.tries_here or "cpu" not in subject.exported.platforms:
        if subject.has_loops and not compilation.tries_here:
            outcome = Outcome(unfinished="it has loops, and no process is available to execute it")
        else:
            (sizes,) = tried.combinations
            run = compiler.run_on(sizes, check_cancelled)
            outcome = Outcome(neighbours.find_difference(run, subject.inputs, subject.outputs))
    else:
        outcome = trials.of_declared(subject, compilation, check_cancelled)
    if outcome.unfinished:
        _log.warning(
            "declared row independence not fully tested",
            model=context.model,
            version=context.version,
            reason=outcome.unfinished,
        )
    return outcome.difference


def _rows(value: Value) -> int:
    return len(value) if isinstance(value, np.ndarray) else value.rows


def _takes(copy: Copy, spec: TensorSpec, array: jax.Array, bucket: int) -> bool:
    return (
        array.shape == bucket_shape(spec, bucket)
        and array.dtype == spec.datatype.dtype
        and array.sharding == copy.site.inputs(bucket)
    )
