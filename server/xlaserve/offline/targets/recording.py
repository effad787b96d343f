"""Records a model's memory on kinds of devices in its manifest."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from xlaserve.artifact import manifest
from xlaserve.artifact.target_sizes import TargetSizes
from xlaserve.errors import InvalidModel
from xlaserve.offline.targets.compiling import Compilers
from xlaserve.offline.targets.jobs import Compiled, Job


def record(path: Path, targets: Iterable[str], compilers: Compilers) -> list[Compiled]:
    """Compile a version directory for one device per target, and record the memory sizes.

    Raises InvalidModel, and records nothing, if compilation for one target fails; raises
    DeviceUnavailable like `Compilers.compile`.
    """
    jobs = [Job(path.parent.name, str(path), target) for target in dict.fromkeys(targets)]
    found = compilers.compile(jobs)
    for one in found:
        if one.problem is not None:
            raise InvalidModel(f"{path} does not load on {one.job.target}: {one.problem}")
    described = manifest.read(path)
    sizes = {**described.sizes, **{one.job.target: _sizes(one) for one in found}}
    manifest.write(path, replace(described, sizes=sizes))
    return found


def _sizes(found: Compiled) -> TargetSizes:
    assert found.reserved is not None
    return TargetSizes(
        found.reserved.parameters_bytes,
        found.reserved.temporaries_bytes // found.in_flight,
        found.reserved.executables_bytes + found.reserved.constants_bytes,
    )
