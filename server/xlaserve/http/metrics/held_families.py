"""Metrics of memory held for clients."""

from collections.abc import Iterable

from xlaserve.grpc.http2.limits import Shared
from xlaserve.http.metrics.metric_family import Family, Row, one
from xlaserve.net.ledger import Kind


def _by_kind(shared: Shared) -> Iterable[Row]:
    ledger = shared.ledger
    held = {kind.name.lower(): ledger.held_for(kind) for kind in Kind}
    return [
        ("", f'kind="{kind}"', count)
        for kind, count in (*held.items(), ("spare", shared.memory.spare_bytes))
    ]


OF_SHARED: tuple[Family[Shared], ...] = (
    Family(
        "xlaserve_held_bytes",
        "gauge",
        "Memory that clients make the server hold: requests, answers, what came ahead, cached "
        "answers; and spare",
        _by_kind,
        ("kind",),
    ),
    Family(
        "xlaserve_held_limit_bytes",
        "gauge",
        "Most that they may (max_held_bytes)",
        lambda shared: one(shared.ledger.limit),
    ),
    Family(
        "xlaserve_held_refusals_total",
        "counter",
        "Requests and answers that were refused for want of that memory",
        lambda shared: one(shared.ledger.refused),
    ),
    Family(
        "xlaserve_held_waits_total",
        "counter",
        "Requests that had to wait for that memory",
        lambda shared: one(shared.ledger.waited),
    ),
)
"""They have no row where nothing is counted."""
