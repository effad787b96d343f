"""The cache warming process: `python -P -m xlaserve.offline.targets.warming PLAN`.

Its environment, input and output are those of `child`. PLAN is a JSON object with the location of
the cache, and the compiler options of the servers that will use it.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from xlaserve.generation import loading as generators
from xlaserve.offline.targets.ahead import Ahead
from xlaserve.offline.targets.child import Child, config_of, serve
from xlaserve.offline.targets.jobs import Compiled, CompiledProgram, Job
from xlaserve.offline.targets.topology import Device
from xlaserve.offline.targets.warming_plan import WarmingPlan
from xlaserve.runtime.devices.target_kinds import Target
from xlaserve.runtime.programs import cache_key
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.compilation_cache import CompilationCache
from xlaserve.runtime.programs.footprint import Footprint
from xlaserve.runtime.programs.kept_programs import KeptPrograms

_FOLLOWS = (
    "not compiled: a loop depends on its inputs, and servers do not use programs that were never"
    " executed"
)


class WarmingChild(Child):
    """Compiles jobs into a cache."""

    def __init__(self, plan: WarmingPlan) -> None:
        super().__init__()
        self._compilation = Compilation(
            CompilationCache(Path(plan.cache_directory), plan.cache_max_bytes),
            plan.options,
            is_ahead=True,
            server_flags=plan.server_flags,
        )

    def compile(self, job: Job, target: Target, versions: dict[str, str]) -> Compiled:
        """Compile a model's programs into the cache; raises the exceptions of the compiler."""
        present = self.opened(target, job.count)
        assert self._compilation.cache is not None
        kind = str(present[0].device_kind)
        self._compilation.cache.prepare(cache_key.target_of(target.platform, kind))
        if generators.is_there(Path(job.path)):
            programs = tuple(self._prepared(job, target, present))
            return Compiled(job, programs, versions=versions)
        model = Ahead.read(
            Path(job.path),
            config_of(job),
            target.platform,
            present,
            compilation=self._compilation,
        )
        if model.plan.loops_follow_inputs:
            return Compiled(job, versions=versions, notice=_FOLLOWS)
        programs = tuple(
            CompiledProgram("", copy.site.device_names[0], rows, sizes, Footprint(), seconds)
            for (copy, rows, sizes), seconds in model.prepare()
        )
        return Compiled(job, programs, versions=versions)

    def _prepared(
        self, job: Job, target: Target, present: Sequence[Device]
    ) -> Iterator[CompiledProgram]:
        """Compile every program of a generator into the cache."""
        model = generators.Ahead.of(Path(job.path), config_of(job), target.platform, present)
        kept = KeptPrograms(self._compilation, job.model, Path(job.path).name)
        for wanted in model.lowering.programs():
            lowered, seconds = wanted.lowered(), 0.0
            place = wanted.place(kept, model.site, lowered)
            if not kept.has(place):
                started = time.perf_counter()
                executable = self._compilation.options.compiled(lowered, model.site)
                seconds = time.perf_counter() - started
                kept.keep(place, executable)
            rows, sizes = model.sizes(wanted)
            name = model.site.device_names[0]
            yield CompiledProgram("", name, rows, sizes, Footprint(), seconds)


if __name__ == "__main__":
    plan = msgspec.json.decode(sys.argv[1], type=WarmingPlan)
    serve(lambda: WarmingChild(plan))
