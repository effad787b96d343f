"""A plan for devices as tables, or as JSON."""

from collections.abc import Iterator
from dataclasses import asdict

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlaserve.cli.printable import printable
from xlaserve.cli.sizes import format_bytes
from xlaserve.offline.device_plan import DevicePlan, PlannedLoad, PlannedVersion
from xlaserve.offline.targets.jobs import CompiledProgram


def show(console: Console, plan: DevicePlan) -> None:
    """Print a headline, tables of programs and models, and details."""
    console.print(_headline(plan), highlight=False, soft_wrap=True, markup=False)
    console.print(_programs(plan))
    console.print(_models(plan))
    for line in _lines(plan):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def as_json(plan: DevicePlan) -> str:
    """Return the plan as one JSON object; sizes are bytes."""
    document = {
        "target": plan.target.name,
        "platform": plan.target.platform,
        "count": plan.count,
        "device_memory_bytes": plan.target.memory_bytes,
        "capacity_bytes": plan.capacity_bytes,
        "models": [_version(one) for one in plan.versions],
        "unreadable": dict(plan.unreadable),
        "ensembles": plan.ensembles,
        "fits_together": plan.fits_together,
        "loads": [asdict(load) for load in plan.loads],
        "eviction_order": plan.resident,
        "mesh": {"capacity_bytes": plan.mesh_capacity_bytes, "problem": plan.mesh_problem},
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _version(one: PlannedVersion) -> dict[str, object]:
    compiled = one.compiled
    return {
        "name": one.name,
        "version": one.version,
        "max_batch_size": compiled.max_batch_size,
        "executions_in_flight": compiled.in_flight,
        "programs": [
            {**asdict(program), "scratch_bytes": program.footprint.scratch_bytes}
            for program in compiled.programs
        ],
        "reserved": asdict(compiled.reserved) if compiled.reserved else None,
        "reserved_bytes": one.reserved_bytes,
        "predicted_bytes": one.predicted_bytes,
        "notice": compiled.notice,
        "problem": asdict(compiled.problem) if compiled.problem else None,
        "versions": compiled.versions,
    }


def _headline(plan: DevicePlan) -> str:
    devices = f"{plan.count} x {plan.target.name}" if plan.count > 1 else plan.target.name
    memory = "the host's memory"
    if plan.target.memory_bytes:
        memory = f"{format_bytes(plan.target.memory_bytes)} each"
    return f"{devices}: {memory}, {format_bytes(plan.capacity_bytes)} of it for models"


def _programs(plan: DevicePlan) -> Table:
    table = Table("model", "version")
    flights = {one.compiled.in_flight for one in plan.versions}
    each = f"{flights.pop()} x" if len(flights) == 1 else "n x"
    for column in ("batch", "parameters", f"{each} in flight", "code", "total", "compiled in"):
        table.add_column(column, justify="right")
    for one in plan.versions:
        for program in one.compiled.programs:
            scratch = one.compiled.in_flight * program.footprint.scratch_bytes
            code = program.footprint.code_bytes + program.footprint.constants_bytes
            parameters = one.compiled.parameters_bytes + program.footprint.padding_bytes
            table.add_row(
                Text(printable(one.name)),
                one.version,
                _batch(program),
                format_bytes(parameters),
                _in_flight(one.compiled.in_flight, program),
                *map(format_bytes, (code, parameters + scratch + code)),
                f"{program.compile_seconds:.1f} s" if program.compile_seconds else "known",
            )
    return table


def _in_flight(count: int, program: CompiledProgram) -> str:
    """Format the memory of concurrent executions, and by how much it could shrink."""
    footprint = program.footprint
    taken = format_bytes(count * footprint.scratch_bytes)
    if not footprint.spared_bytes:
        return taken
    return f"{taken}, or {format_bytes(count * footprint.spared_bytes)} less"


def _batch(program: CompiledProgram) -> str:
    sizes = ",".join(map(str, program.sizes))
    rows = str(program.rows) if program.rows else ""
    return " ".join(filter(None, (rows, f"({sizes})" if sizes else ""))) or "-"


def _models(plan: DevicePlan) -> Table:
    table = Table("model", "version")
    for column in ("parameters", "in flight", "code", "each device", "reported to mesh"):
        table.add_column(column, justify="right")
    table.add_column("", overflow="fold")
    loads = {(load.name, load.version): load for load in plan.loads}
    for one in plan.versions:
        reserved = one.compiled.reserved
        cells = [""] * 4
        if reserved is not None:
            devices = max(1, len(reserved.per_device))
            parts = (
                reserved.parameters_bytes,
                reserved.temporaries_bytes,
                reserved.executables_bytes + reserved.constants_bytes,
            )
            cells = [*(format_bytes(part // devices) for part in parts)]
            cells.append(format_bytes(one.reserved_bytes))
        predicted = format_bytes(one.predicted_bytes) if one.predicted else ""
        outcome = _outcome(loads.get((one.name, one.version)))
        table.add_row(Text(printable(one.name)), one.version, *cells, predicted, outcome)
    return table


def _outcome(load: PlannedLoad | None) -> str:
    """Summarize the outcome of a load; the lines below the table have the details."""
    if load is None:
        return "does not load"
    if load.refused:
        return "does not fit"
    return "evicts" if load.evicted else "fits"


def _key(one: PlannedVersion | PlannedLoad) -> str:
    return f"{printable(one.name)}/{one.version}"


def _lines(plan: DevicePlan) -> Iterator[str]:
    yield from _troubles(plan)
    if plan.ensembles:
        names = ", ".join(map(printable, plan.ensembles))
        yield f"Ensembles use the memory of their steps: {names}"
    if plan.loads and plan.fits_together:
        yield "All models that compile fit together."
    elif plan.loads:
        yield (
            "Not all models fit together. Loads in order of name, with --evict; without it, loads"
            " that would evict others are refused."
        )
    if plan.resident:
        yield f"Evicted first to last: {', '.join(map(printable, plan.resident))}"
    if plan.mesh_problem:
        yield f"ModelMesh: {plan.mesh_problem}"
    else:
        yield f"Reported to ModelMesh: {format_bytes(plan.mesh_capacity_bytes)} (runtimeStatus)."
    versions = {name: v for one in plan.versions for name, v in one.compiled.versions.items()}
    if versions:
        yield "Compiled with " + ", ".join(f"{name} {v}" for name, v in versions.items()) + "."


def _troubles(plan: DevicePlan) -> Iterator[str]:
    """Describe why models are missing, do not fit, or evict others."""
    for name, reason in plan.unreadable.items():
        yield f"{printable(name)}: {printable(reason)}"
    for one in plan.versions:
        if one.compiled.problem is not None:
            yield f"{_key(one)} does not load: {printable(str(one.compiled.problem))}"
    for load in plan.loads:
        if load.refused:
            yield f"{_key(load)} does not fit: {printable(load.refused)}"
        elif load.evicted:
            yield f"{_key(load)} evicts {', '.join(map(printable, load.evicted))}"
