"""The programs of a loaded model, compiled and pending, with their memory."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from xlaserve.artifact import manifest
from xlaserve.artifact.shapes import OpenDimensions, Sizes
from xlaserve.errors import LoadCancelled
from xlaserve.model_config.buckets import BucketPlan
from xlaserve.runtime.failures import invalid_model
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import ModelInfo, ModelMemory, Stage
from xlaserve.runtime.programs.held_memory import growth_of, memory_of
from xlaserve.runtime.programs.on_demand import OnDemandShapes
from xlaserve.runtime.programs.program_table import Copy, Program, buckets_of
from xlaserve.runtime.programs.programs import Compiler
from xlaserve.runtime.programs.shared_programs import Lease


class Stock:
    """Compiles a model's programs during and after its load, and keeps `info` up to date."""

    def __init__(
        self,
        model: str,
        info: ModelInfo,
        copies: Sequence[Copy],
        lease: Lease,
        on_info: Callable[[ModelInfo], None],
    ) -> None:
        self.info = info
        """Updated with every new program; `on_info` notifies the model."""
        self._on_info = on_info
        self._model = model
        self._copies = tuple(copies)
        self._lease = lease
        """The model's lease on its computation's shared programs."""
        self._dimensions: OpenDimensions | None = None
        self._is_exact = False
        """Whether the first size of each program is its number of rows."""
        self._module_bytes = 0
        self._compiler: Compiler | None = None
        self._rest: list[int] = []
        self._closed = False
        self._compiling = threading.Lock()
        self._changing = threading.Lock()
        """Guards `info` and the list of pending programs. Held only briefly: models that share a
        computation update both from each other's threads.
        """
        self._making: int | None = None
        """The bucket that a thread of this model is compiling, or None."""
        self._on_memory: Callable[[], None] = lambda: None
        self._on_handed_on: Callable[[], None] = lambda: None
        self._on_demand: OnDemandShapes | None = None

    def start(
        self,
        compiler: Compiler,
        plan: BucketPlan,
        dimensions: OpenDimensions,
        context: LoadContext,
        *,
        on_demand: OnDemandShapes | None,
    ) -> None:
        """Compile the programs that the first request needs; the rest now or in the background."""
        self._compiler = compiler
        self._dimensions = dimensions
        self._is_exact = dimensions.has_rows
        self._module_bytes = len(self._lease.exported.mlir_module_serialized)
        self._on_memory = context.on_memory
        self._on_handed_on = context.on_handed_on
        self._on_demand = on_demand
        if context.background_compile and dimensions.combinations:
            self._rest.extend(plan.rest)
        first = plan.first if self._rest else plan.sizes
        self._compile_now(first, context.check_cancelled, context.on_stage)
        self._lease.on_change = self._shared_changed
        with self._changing:
            self._take_found()
            # Another model may have been unloaded before `on_change` was set.
            self._take_stock(compiler)
        self._finish_compiling()

    def _compile_now(
        self,
        buckets: Sequence[int],
        check_cancelled: Callable[[], None],
        on_stage: Callable[[Stage], None],
    ) -> None:
        """Compile and warm buckets, make them available to requests, and update `info`."""
        assert self._compiler is not None
        self._compiler.compile(buckets, check_cancelled, on_stage)
        with self._changing:
            self._take_stock(self._compiler)

    def _take_stock(self, compiler: Compiler, on_demand_compilations: int | None = None) -> None:
        compiled_programs, cached_programs = compiler.made
        known = self.info.on_demand_compilations
        self._set(
            replace(
                self.info,
                memory=self._memory(),
                compile_seconds=compiler.seconds,
                buckets=buckets_of(self._copies, is_exact=self._is_exact),
                on_demand_compilations=known
                if on_demand_compilations is None
                else on_demand_compilations,
                compiled_programs=compiled_programs,
                cached_programs=cached_programs,
                shared_programs=compiler.shared,
            )
        )

    def _set(self, info: ModelInfo) -> None:
        self.info = info
        self._on_info(info)

    def _memory(self) -> ModelMemory:
        lease = self._lease
        module_bytes = self._module_bytes if lease.carries_module else 0
        carried = memory_of(self._copies, module_bytes, lambda program: lease.carries(program.key))
        alone = memory_of(self._copies, self._module_bytes)
        return replace(carried, computation=lease.key, alone_per_device=alone.per_device)

    def _shared_changed(self) -> None:
        """Adopt programs and memory of another model with the same computation.

        Runs on the other model's thread, which holds none of its locks.
        """
        with self._changing:
            if self._closed and not self._copies[0].programs:
                return
            before = self.info
            self._take_found()
            self._set(replace(self.info, memory=self._memory()))
            changed = self.info.memory != before.memory
        if changed:
            self._on_memory()

    def _take_found(self) -> None:
        """Use another model's programs for pending buckets."""
        compiler = self._compiler
        if compiler is None or self._closed:
            return
        for bucket in [bucket for bucket in self._rest if bucket != self._making]:
            found = compiler.found(bucket)
            for copy, program in found:
                copy.add(program)
            if found:
                self._rest.remove(bucket)
                self._take_stock(compiler)

    def compile_one(self, bucket: int, sizes: Sizes) -> tuple[Program, ...]:
        """Compile and warm one more program for every copy.

        Raises OutOfMemory or InvalidModel, or LoadCancelled after `stop` or `close`.
        """
        with self._compiling, invalid_model(self._model, manifest.ARTIFACT):
            if self._compiler is None:
                raise LoadCancelled(self._model)
            return self._compiler.compile_one(bucket, sizes, self._check_open)

    def keep(self, programs: Sequence[tuple[Program, ...]]) -> None:
        """Update `info` after an on-demand compilation."""
        with self._compiling:
            if self._compiler is None:
                return
            before = {one.key for copy in self._copies for one in copy.on_demand}
            with self._changing:
                for index, copy in enumerate(self._copies):
                    copy.on_demand = tuple(of_copies[index] for of_copies in programs)
                self._lease.drop(before - {o.key for copy in self._copies for o in copy.on_demand})
                self._take_stock(self._compiler, self.info.on_demand_compilations + 1)

    @property
    def next_bucket_bytes(self) -> Mapping[str, int]:
        """Return an upper bound of the memory of the next pending bucket, by device."""
        if not self._rest:
            return {}
        combinations = len(self._dimensions.combinations) if self._dimensions else 1
        return growth_of(self._copies, self._module_bytes, combinations)

    def compile_rest(
        self,
        check_cancelled: Callable[[], None] = lambda: None,
        on_stage: Callable[[Stage], None] = lambda stage: None,
    ) -> None:
        """Compile and warm the pending buckets one after the other."""

        def check() -> None:
            self._check_open()
            check_cancelled()

        def of_all(stage: Stage) -> None:
            on_stage(Stage(stage.name, steps - len(self._rest) + 1, steps))

        steps = len(self._rest)
        if not steps:
            with self._compiling:
                self._finish_compiling()
            return
        try:
            with invalid_model(self._model, manifest.ARTIFACT):
                while self._compile_one(check, of_all):
                    pass
        except LoadCancelled:
            if not self._closed:
                raise

    def _compile_one(self, check: Callable[[], None], on_stage: Callable[[Stage], None]) -> bool:
        """Compile the next pending bucket, if there is one; `close` waits for it."""
        check()  # This call may block, so make it before taking the lock that `close` waits for.
        with self._compiling:
            self._check_open()
            with self._changing:
                self._making = next(iter(self._rest), None)
            if self._making is None:
                self._finish_compiling()
                return False
            try:
                self._compile_now([self._making], self._check_open, on_stage)
                with self._changing:
                    self._rest.remove(self._making)
            finally:
                self._making = None
            self._finish_compiling()
            return True

    def _check_open(self) -> None:
        if self._closed:
            raise LoadCancelled(self._model)

    def _finish_compiling(self) -> None:
        if not self._rest and self._on_demand is None:
            self._drop_compiler()

    def _drop_compiler(self) -> None:
        self._compiler = None
        self._rest.clear()
        self._lease.stop_compiling()

    def stop(self) -> None:
        """Stop compiling: running and later compilations raise LoadCancelled at the next check."""
        self._closed = True
        self._lease.leave()

    def close(self) -> None:
        """Release parameters and executables, after waiting for a bucket that is being compiled."""
        self._closed = True
        with self._compiling:
            with self._changing:
                self._drop_compiler()
            self._lease.release(self._handed_on)
            with self._changing:
                for copy in self._copies:
                    copy.clear()
                if self._on_demand is not None:
                    self._on_demand.clear()

    def _handed_on(self) -> None:
        """Remove shared memory from this model's total, because another model now accounts for it.

        Memory that is not shared is counted until it is free.
        """
        with self._changing:
            self._set(replace(self.info, memory=self._memory()))
        self._on_handed_on()
