"""Metrics of the server as a whole: memory, connections and repository."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from xlaserve.concurrency.abandoned import AbandonedWork
from xlaserve.grpc.http2.limits import Shared
from xlaserve.http.metrics.metric_family import Family, Row, counter, escape, gauge, one
from xlaserve.net.ledger import Kind
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.repository.watches import RepositoryWatches
from xlaserve.runtime.programs.mappings import UNLIMITED, Mappings


@dataclass(frozen=True, slots=True)
class ServerReading:
    """Sources of the server-wide metrics."""

    capacity: Capacity
    connections: Mapping[str, Callable[[], int]]
    watch: RepositoryWatches | None
    """The watches of the repository; None if it is unknown, and then its metrics have no rows."""
    abandoned: AbandonedWork | None = None
    """Abandoned loads and compilations; None if no work can be abandoned."""
    mappings: Mappings = UNLIMITED
    """Not counted if the system does not report mappings or has no limit."""
    stores: Callable[[], Mapping[str, str]] = dict
    """Returns the error of each store by its URL; empty if the store answers."""


def _total_bytes(server: ServerReading) -> Iterable[Row]:
    total = server.capacity.total_bytes
    return () if total is None else one(total)


def _by_device(sizes: Mapping[str, int]) -> Iterable[Row]:
    return [("", f'device="{escape(device)}"', size) for device, size in sizes.items()]


def _readable(server: ServerReading) -> Iterable[Row]:
    return () if server.watch is None else one(int(not server.watch.problem))


def _skipped(server: ServerReading) -> Iterable[Row]:
    return () if server.watch is None else one(server.watch.skipped)


OF_SERVER: tuple[Family[ServerReading], ...] = (
    gauge("xlaserve_capacity_bytes", "Memory for models on all devices", _total_bytes),
    gauge(
        "xlaserve_capacity_used_bytes",
        "Memory reserved by loaded and loading models",
        lambda server: one(server.capacity.used_bytes),
    ),
    gauge(
        "xlaserve_device_capacity_bytes",
        "Memory for models on each device",
        lambda server: _by_device(server.capacity.totals),
        "device",
    ),
    gauge(
        "xlaserve_device_capacity_used_bytes",
        "Part of it reserved by loaded and loading models",
        lambda server: _by_device(
            {device: server.capacity.used_on(device) for device in server.capacity.totals}
        ),
        "device",
    ),
    gauge(
        "xlaserve_connections",
        "Open connections of clients: grpc or http",
        lambda server: [
            ("", f'protocol="{escape(protocol)}"', count())
            for protocol, count in server.connections.items()
        ],
        "protocol",
    ),
    gauge(
        "xlaserve_repository_readable",
        "1 if the last poll of the repository succeeded, 0 otherwise",
        _readable,
    ),
    gauge(
        "xlaserve_store_readable",
        "1 if a store of the repository answered the last request, 0 otherwise; polled every"
        " poll_interval_seconds in every control mode, absent for directories",
        lambda server: [
            ("", f'store="{escape(url)}"', int(not problem))
            for url, problem in server.stores().items()
        ],
        "store",
    ),
    gauge(
        "xlaserve_repository_skipped_entries",
        "Repository entries that are not models, at the last poll",
        _skipped,
    ),
    gauge(
        "xlaserve_abandoned_work",
        "Timed-out loads and compilations whose threads are still running",
        lambda server: () if server.abandoned is None else one(len(server.abandoned)),
    ),
    gauge(
        "xlaserve_memory_mappings",
        "Memory mappings of the process, as last counted at a compilation or unload",
        lambda server: one(server.mappings.used) if server.mappings.is_counted else (),
    ),
    gauge(
        "xlaserve_memory_mappings_limit",
        "Limit of memory mappings for compiling another program",
        lambda server: one(server.mappings.limit) if server.mappings.is_counted else (),
    ),
)


def _by_kind(shared: Shared) -> Iterable[Row]:
    ledger = shared.ledger
    held = {kind.name.lower(): ledger.held_for(kind) for kind in Kind}
    return [
        ("", f'kind="{kind}"', count)
        for kind, count in (*held.items(), ("spare", shared.memory.spare_bytes))
    ]


OF_SHARED: tuple[Family[Shared], ...] = (
    gauge(
        "xlaserve_held_bytes",
        "Memory held for clients: requests, answers, read-ahead, cached answers and spare buffers",
        _by_kind,
        "kind",
    ),
    gauge(
        "xlaserve_held_limit_bytes",
        "Limit of memory held for clients (max_held_bytes)",
        lambda shared: one(shared.ledger.limit),
    ),
    counter(
        "xlaserve_held_refusals_total",
        "Requests and answers refused because of that limit",
        lambda shared: one(shared.ledger.refused),
    ),
    counter(
        "xlaserve_held_waits_total",
        "Requests that waited for that memory",
        lambda shared: one(shared.ledger.waited),
    ),
)
"""Metrics of the memory ledger; omitted if the server has none."""
