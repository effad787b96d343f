"""Adds up the memory of a model's copies by device."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from xlaserve.artifact.sizes import EXECUTABLE_BYTES
from xlaserve.runtime.loaded import ModelMemory
from xlaserve.runtime.programs.program_table import Copy, Program


def everything(program: Program) -> bool:
    """Count every program: none is shared."""
    return True


def memory_of(
    copies: Sequence[Copy], module_bytes: int, carries: Callable[[Program], bool] = everything
) -> ModelMemory:
    """Add up the memory that the copies hold now.

    A shared program, and the module, count for the model that `carries` them. On the host the
    module counts once: its size is mostly constants, and XLA keeps these once for all programs. On
    accelerators no module is kept, and the compiler reports the size of constants.
    """
    parameters, constants, scratch, code = 0, 0, 0, 0
    per_device = Counter[str]()
    for copy in copies:
        devices = copy.site.device_names
        carried = [one for one in copy.programs if carries(one)]
        own = (
            copy.leaves_bytes
            + max((one.footprint.padding_bytes for one in copy.programs), default=0),
            _constants(copy, carried),
            copy.in_flight * max((one.footprint.scratch_bytes for one in copy.programs), default=0),
            sum(one.footprint.code_bytes or EXECUTABLE_BYTES for one in carried),
        )
        per_device.update(dict.fromkeys(devices, sum(own)))
        parameters += own[0] * len(devices)
        constants += own[1] * len(devices)
        scratch += own[2] * len(devices)
        code += own[3] * len(devices)
    if not copies[0].site.is_accelerator:
        code += module_bytes
        per_device.update({copies[0].site.device_names[0]: module_bytes})
    return ModelMemory(parameters, constants, scratch, code, MappingProxyType(dict(per_device)))


def _constants(copy: Copy, programs: Sequence[Program]) -> int:
    """Return the bytes of constants in a copy's programs on each device.

    All programs of an artifact have the same constants, and a GPU stores equal constants once.
    """
    if not copy.site.is_accelerator:
        return 0
    found = [one.footprint.constants_bytes for one in programs]
    return max(found, default=0) if copy.site.platform == "cuda" else sum(found)


def growth_of(copies: Sequence[Copy], module_bytes: int, programs: int) -> Mapping[str, int]:
    """Estimate the growth per device for this many further programs per copy.

    Assumes the code size of the largest existing program, and on the host another module, because
    it is lowered again. Scratch memory does not grow: the program with the most rows is compiled
    first.
    """
    per_device = Counter[str]()
    for copy in copies:
        code = max((one.footprint.code_bytes for one in copy.programs), default=0)
        added = programs * (code or EXECUTABLE_BYTES)
        per_device.update(dict.fromkeys(copy.site.device_names, added))
    if not copies[0].site.is_accelerator:
        per_device.update({copies[0].site.device_names[0]: module_bytes})
    return dict(per_device)
