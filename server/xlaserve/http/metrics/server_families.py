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
    """None if nothing is known of the repository; its metrics then have no rows."""
    abandoned: AbandonedWork | None = None
    """None if no work can be abandoned."""
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
        "Memory that loaded and loading models have booked",
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
        "Part of it that loaded and loading models have booked",
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
        "1 where the last look at the repository saw what is there, 0 otherwise",
        _readable,
    ),
    gauge(
        "xlaserve_store_readable",
        "1 where a store of the repository answered the last request, 0 otherwise; it is asked "
        "every poll_interval_seconds in every mode of control, and absent for directories",
        lambda server: [
            ("", f'store="{escape(url)}"', int(not problem))
            for url, problem in server.stores().items()
        ],
        "store",
    ),
    gauge(
        "xlaserve_repository_skipped_entries",
        "Entries of the repository that are no models, at the last look",
        _skipped,
    ),
    gauge(
        "xlaserve_abandoned_work",
        "Loads and compilations that took too long, and whose threads have not ended",
        lambda server: () if server.abandoned is None else one(len(server.abandoned)),
    ),
    gauge(
        "xlaserve_memory_mappings",
        "Memory mappings of the process when they were last counted, at a compilation or unload",
        lambda server: one(server.mappings.used) if server.mappings.is_counted else (),
    ),
    gauge(
        "xlaserve_memory_mappings_limit",
        "Memory mappings that the process may have for another program to be compiled",
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
        "Memory that clients make the server hold: requests, answers, what came ahead, cached "
        "answers; and spare",
        _by_kind,
        "kind",
    ),
    gauge(
        "xlaserve_held_limit_bytes",
        "Most that they may (max_held_bytes)",
        lambda shared: one(shared.ledger.limit),
    ),
    counter(
        "xlaserve_held_refusals_total",
        "Requests and answers that were refused for want of that memory",
        lambda shared: one(shared.ledger.refused),
    ),
    counter(
        "xlaserve_held_waits_total",
        "Requests that had to wait for that memory",
        lambda shared: one(shared.ledger.waited),
    ),
)
"""Metrics of the memory ledger; omitted if the server has none."""
