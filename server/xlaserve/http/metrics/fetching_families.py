"""Metrics of models fetched from stores."""

from xlaserve.http.metrics.metric_family import Family, one
from xlaserve.storage.fetching import FetchCounts

OF_FETCHING: tuple[Family[FetchCounts], ...] = (
    Family(
        "xlaserve_fetched_bytes_total",
        "counter",
        "Bytes that were fetched from stores; absent, as the next are, without a repository in one",
        lambda counts: one(counts.fetched_bytes),
    ),
    Family(
        "xlaserve_fetched_models_total",
        "counter",
        "Model versions that were fetched whole",
        lambda counts: one(counts.models),
    ),
    Family(
        "xlaserve_fetch_seconds_total",
        "counter",
        "Time in which model versions were fetched, of all of them together",
        lambda counts: one(counts.seconds),
    ),
    Family(
        "xlaserve_fetch_failures_total",
        "counter",
        "Fetches that failed; those that were cancelled are not among them",
        lambda counts: one(counts.failures),
    ),
    Family(
        "xlaserve_fetch_retries_total",
        "counter",
        "Requests to stores that were sent again",
        lambda counts: one(counts.retries),
    ),
    Family(
        "xlaserve_store_request_failures_total",
        "counter",
        "Requests to stores that failed in all attempts; those for files of a fetch fail that",
        lambda counts: one(counts.refused),
    ),
)
