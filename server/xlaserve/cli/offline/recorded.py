"""The option that records a model's memory on absent devices, and its implementation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from xlaserve.cli.sizes import format_bytes
from xlaserve.cli.termination import unwinding_on_signals
from xlaserve.offline.targets import recording
from xlaserve.offline.targets.compiling import Compilers
from xlaserve.runtime.devices.target_kinds import TARGETS

HELP = (
    "Also compile for this kind of device, which may be absent, and record the memory sizes in"
    f" the manifest; may be repeated: {', '.join(TARGETS)}."
)

Targets: TypeAlias = Annotated[list[str] | None, typer.Option("--target", help=HELP)]
"""Command-line option that records a model's memory sizes."""


def record(path: Path, targets: Sequence[str] | None) -> None:
    """Record a version's memory for each target; raises InvalidModel, DeviceUnavailable."""
    if not targets:
        return
    with unwinding_on_signals(), Compilers() as compilers:
        for done in recording.record(path, targets, compilers):
            assert done.reserved is not None
            (size,) = done.reserved.per_device.values()
            typer.echo(f"{done.job.target}: {format_bytes(size)}")
