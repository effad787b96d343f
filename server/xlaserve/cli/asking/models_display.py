"""Models of a server as tables, and configurations in words."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from xlaserve.cli.printable import printable
from xlaserve.cli.sizes import format_bytes
from xlaserve.dialing.interface import IndexEntry, Json

_GONE = "gone"
"""State of a version that has disappeared from the index."""


def index_table(entries: Sequence[IndexEntry], sizes: Mapping[tuple[str, str], int]) -> Table | str:
    """Return the index as a table, with the known sizes of versions."""
    if not entries:
        return "no models"
    table = Table("model", "version", "state")
    table.add_column("memory", justify="right")
    table.add_column("reason", overflow="fold")
    for entry in entries:
        size = sizes.get((entry.name, entry.version))
        table.add_row(
            Text(printable(entry.name)),
            Text(printable(entry.version)),
            Text(printable(entry.state or "not loaded")),
            "" if size is None else format_bytes(size),
            Text(printable(entry.reason)),
        )
    return table


def state_line(entry: IndexEntry) -> str:
    """Format a version and its state as one line."""
    version = f" version {entry.version}" if entry.version else ""
    reason = f": {entry.reason}" if entry.reason else ""
    return printable(f"{entry.name}{version} {entry.state or 'not loaded'}{reason}")


def changes(
    before: Mapping[tuple[str, str], IndexEntry], now: Mapping[tuple[str, str], IndexEntry]
) -> Iterator[IndexEntry]:
    """Yield new or changed versions, then removed ones."""
    for key, entry in now.items():
        if before.get(key) != entry:
            yield entry
    for name, version in before.keys() - now.keys():
        yield IndexEntry(name, version, _GONE)


def number(value: object) -> int:
    """Return an integer from proto-JSON, possibly written as a string; 0 if it is missing."""
    return int(value) if isinstance(value, int | str) and str(value).isdecimal() else 0


_LEAST_NAME = 10
"""Minimum number of columns for names of models, which wrap."""


def memory_of(row: Json) -> int:
    """Return the memory of a version on all devices, from its statistics, in bytes."""
    return sum(number(use.get("byte_size")) for use in row.get("memory_usage") or ())


def duration(row: Json, name: str) -> tuple[int, int]:
    """Return count and nanoseconds of one duration in the statistics extension."""
    times = (row.get("inference_stats") or {}).get(name) or {}
    return number(times.get("count")), number(times.get("ns"))


def mean_ms(count: int, ns: int) -> str:
    """Format a mean in milliseconds; empty if the count is 0."""
    return f"{ns / count / 1e6:.3g}" if count else ""


def statistics_table(rows: Sequence[Json]) -> Table | str:
    """Return the statistics of versions as a table; times are means in milliseconds."""
    if not rows:
        return "no models are loaded"
    # Column lines would take the space of the headings.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold", min_width=_LEAST_NAME)
    table.add_column("version", overflow="fold")
    for heading in ("requests", "failed", "rows", "runs", "ms", "queue", "compute", "memory"):
        table.add_column(heading, justify="right", overflow="fold", min_width=len(heading))
    for row in rows:
        requests, _ = succeeded = duration(row, "success")
        memory = memory_of(row)
        table.add_row(
            Text(printable(row.get("name", ""))),
            Text(printable(row.get("version", ""))),
            str(requests),
            str(duration(row, "fail")[0]),
            str(number(row.get("inference_count"))),
            str(number(row.get("execution_count"))),
            mean_ms(*succeeded),
            mean_ms(*duration(row, "queue")),
            mean_ms(*duration(row, "compute_infer")),
            format_bytes(memory) if memory else "",
        )
    return table


def model_lines(found: Json) -> Iterator[str]:
    """Describe a model line by line: metadata, versions and configuration."""
    metadata, versions, config = found["metadata"], found["versions"], found["configuration"]
    yield printable(f"{metadata.get('name', '')} ({metadata.get('platform') or 'no platform'})")
    for heading in ("inputs", "outputs"):
        yield f"{heading}:"
        for tensor in metadata.get(heading) or ():
            shape = ",".join(map(str, tensor.get("shape") or ()))
            yield printable(f"  {tensor.get('name')} {tensor.get('datatype')}[{shape}]")
    precision = (metadata.get("parameters") or {}).get("matmul_precision")
    if precision:
        yield printable(f"FP32 products: {_said(precision)} precision (matmul_precision)")
    yield "versions:"
    if versions:
        for row in versions:
            reason = f": {row['reason']}" if row["reason"] else ""
            yield printable(f"  {row['version'] or '-'} {row['state'] or 'not loaded'}{reason}")
    else:
        yield printable(f"  {', '.join(metadata.get('versions') or ())}")
    yield "configuration:"
    if config is None:
        yield "  not reported by the server"
    else:
        yield from (f"  {printable(line)}" for line in config_lines(config))


def config_lines(config: Json) -> Iterator[str]:
    """Describe the parts of a configuration that affect answers or their latency."""
    rows = number(config.get("max_batch_size"))
    yield f"batches of up to {rows} rows" if rows else "no batching: requests have all dimensions"
    for field, words in _WORDS.items():
        value = config.get(field)
        if value:
            yield from words(value)


def _dynamic(value: Json) -> Iterator[str]:
    delay = number(value.get("max_queue_delay_microseconds"))
    preferred = value.get("preferred_batch_size") or ()
    yield (
        "requests are batched"
        + (f", waiting up to {delay} µs" if delay else "")
        + (f", preferably to {', '.join(map(str, preferred))} rows" if preferred else "")
    )


def _instances(value: list[Json]) -> Iterator[str]:
    for group in value:
        kind = str(group.get("kind") or "KIND_AUTO").removeprefix("KIND_")
        gpus = ",".join(map(str, group.get("gpus") or ()))
        yield f"{number(group.get('count')) or 1} instances on {kind}{f' {gpus}' if gpus else ''}"


def _parameters(value: Mapping[str, Any]) -> Iterator[str]:
    for name, each in value.items():
        yield f"parameter {name} = {_said(each)}"


def _said(value: Any) -> Any:
    """Return the value of a parameter; a protobuf message has it in its only field."""
    return next(iter(value.values()), "") if isinstance(value, dict) else value


def _steps(value: Json) -> Iterator[str]:
    named = [str(step.get("model_name")) for step in value.get("step") or ()]
    yield f"an ensemble of {', '.join(named)}"


_WORDS: Mapping[str, Callable[[Any], Iterator[str]]] = {
    "dynamic_batching": _dynamic,
    "sequence_batching": lambda _: iter(["requests of a sequence go to the same instance"]),
    "ensemble_scheduling": _steps,
    "instance_group": _instances,
    "response_cache": lambda field: iter(["answers are cached"] if field.get("enable") else []),
    "model_transaction_policy": lambda field: iter(
        ["a request may have several answers"] if field.get("decoupled") else []
    ),
    "parameters": _parameters,
}
"""Functions that describe each field."""
