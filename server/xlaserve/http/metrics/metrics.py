"""Prometheus metrics of model versions, memory, and the process."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.openmetrics import exposition

from xlaserve.concurrency.abandoned import AbandonedWork
from xlaserve.concurrency.others import NOBODY, About, Others, Question
from xlaserve.grpc.http2.limits import Shared
from xlaserve.http.accept import preferred
from xlaserve.http.messages import HttpRequest, HttpResponse
from xlaserve.http.metrics.generation_families import OF_GENERATORS, GenerationReading
from xlaserve.http.metrics.metric_families import (
    FAILURE,
    LOAD_FAILURES,
    OF_MODELS,
    OF_VERSIONS,
    REQUEST_SECONDS,
    LoadCounts,
    VersionReading,
    failure_rows,
    seconds_bound,
)
from xlaserve.http.metrics.metric_family import escape
from xlaserve.http.metrics.metric_folds import FoldedMetrics, MetricsSnapshot, newest, of_workers
from xlaserve.http.metrics.model_families import written
from xlaserve.http.metrics.observing_families import OF_FETCHING, OF_OBSERVING, ObservingReading
from xlaserve.http.metrics.openmetrics import END, OPENMETRICS_TYPE, exemplar_text, to_openmetrics
from xlaserve.http.metrics.program_families import OF_PROGRAMS
from xlaserve.http.metrics.server_families import OF_SERVER, OF_SHARED, ServerReading
from xlaserve.http.routing import Body, Route
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.failed_loads import is_failure
from xlaserve.residence.lifecycle import State
from xlaserve.residence.registry import Registry, Version
from xlaserve.residence.reports.failing import failing
from xlaserve.residence.reports.monitor import every_version
from xlaserve.residence.repository.watches import RepositoryWatches
from xlaserve.runtime.generator.counts import CountsTokens
from xlaserve.runtime.metrics import ModelMetrics
from xlaserve.runtime.programs.mappings import UNLIMITED, Mappings
from xlaserve.runtime.programs.program_counts import ProgramCounts
from xlaserve.serving.call import Operation
from xlaserve.serving.observability.exemplar import Exemplar
from xlaserve.serving.observability.statistics_sum import sum_of
from xlaserve.serving.stations.backlog import NO_BACKLOG, Backlog
from xlaserve.storage.fetching import FetchCounts

_log = structlog.get_logger("metrics")

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of the Prometheus text format."""

_LOAD_FAILURES_AT = [family.name for family in OF_VERSIONS].index(LOAD_FAILURES)
_FAILURE_AT = [family.name for family in OF_VERSIONS].index(FAILURE)
SHARED_NAME = "other"
"""Value of the labels `model` and `version` in the series shared by all versions above the
limit."""

DEFAULT_MAX_VERSIONS = 2000

_VERSIONS_AT_A_TIME = 32
"""Versions written before the event loop serves requests."""


class Metrics:
    """Writes all metrics in Prometheus' text format, reading them from their sources."""

    def __init__(
        self,
        registry: Registry,
        capacity: Capacity,
        connections: Mapping[str, Callable[[], int]] = MappingProxyType({}),
        watch: RepositoryWatches | None = None,
        *,
        abandoned: AbandonedWork | None = None,
        mappings: Mappings = UNLIMITED,
        shared: Shared | None = None,
        of_code: ModelMetrics | None = None,
        observing: ObservingReading | None = None,
        fetching: FetchCounts | None = None,
        programs: Mapping[str, ProgramCounts] = MappingProxyType({}),
        failed_loads: Mapping[str, int] = MappingProxyType({}),
        stores: Callable[[], Mapping[str, str]] = dict,
        max_versions: int = DEFAULT_MAX_VERSIONS,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        others: Others = NOBODY,
    ) -> None:
        """`of_code` has the metrics of model code, `programs` those of the compilation caches.

        At most `max_versions` versions, and as many models, have series of their own; the remaining
        versions share one. `now_ns` is the clock of the stations.
        """
        self._now_ns = now_ns
        self._fetching = fetching
        self._programs = programs
        self._failed_loads = failed_loads
        self._observing = observing or ObservingReading()
        self._max_versions = max_versions
        self._is_logged = False
        """Whether the warning about the shared series was logged."""
        self._registry = registry
        self._server = ServerReading(capacity, connections, watch, abandoned, mappings, stores)
        self._shared = shared
        self._of_code = of_code
        self._others = others
        others.answer(Question.METRICS, self._snapshot)
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def table(self) -> list[Route]:
        """Return the route of `GET /metrics`."""
        answer = Body(media_types=(METRICS_TYPE, OPENMETRICS_TYPE))
        return [
            Route(
                "GET",
                "/metrics",
                Operation.METRICS,
                self.show,
                "Metrics for Prometheus",
                "people",
                answer,
            )
        ]

    async def show(self, request: HttpRequest) -> HttpResponse:
        """Return all metrics, as OpenMetrics with exemplars if the client prefers that format."""
        offers = METRICS_TYPE.partition(";")[0], OPENMETRICS_TYPE.partition(";")[0]
        accepted = preferred(request.headers.get("Accept", ""), offers)
        headers = {"Vary": "Accept"}
        is_open = accepted == offers[1]
        if self._others.are_there:
            parts = await self._of_all(is_open=is_open)
        else:
            parts = await (self.openmetrics() if is_open else self.parts())
        kind = OPENMETRICS_TYPE if is_open else METRICS_TYPE
        return HttpResponse(content_type=kind, parts=parts, headers=headers)

    async def openmetrics(self) -> list[bytes]:
        """Return the metrics in the OpenMetrics format, with exemplars."""
        exemplars = {row: exemplar_text(exemplar) for row, exemplar in self._exemplars()}
        texts = await self._texts()
        parts = []
        for text in texts:
            await asyncio.sleep(0)
            parts.append(to_openmetrics(text, exemplars).encode())
        generate: Callable[[CollectorRegistry], bytes] = exposition.generate_latest
        return [*parts, generate(self._process).removesuffix(END), END]

    async def parts(self) -> list[bytes]:
        """Return the text in parts, one for each family."""
        texts = await self._texts()
        return [*(text.encode() for text in texts), generate_latest(self._process)]

    async def _of_all(self, *, is_open: bool) -> list[bytes]:
        """Return the merged metrics of all workers, with a gauge that names silent ones."""
        own = await self._snapshot({})
        replies = await self._others.ask(Question.METRICS, {}, own, MetricsSnapshot)
        folded = FoldedMetrics()
        for worker, snapshot in replies.answers.items():
            for _ in folded.add(worker, snapshot.text):
                await asyncio.sleep(0)
        present = dict.fromkeys(replies.answers, True) | dict.fromkeys(replies.missing, False)
        exemplars = newest([snapshot.exemplars for snapshot in replies.answers.values()])
        parts = []
        for text in (*folded.texts(), of_workers(present)):
            await asyncio.sleep(0)
            parts.append((to_openmetrics(text, exemplars) if is_open else text).encode())
        return [*parts, END] if is_open else parts

    async def _snapshot(self, about: About) -> MetricsSnapshot:
        texts = [*await self._texts(), generate_latest(self._process).decode()]
        exemplars = {row: (one.at, exemplar_text(one)) for row, one in self._exemplars()}
        return MetricsSnapshot("".join(texts), exemplars)

    def _exemplars(self) -> Iterator[tuple[str, Exemplar]]:
        """Yield all exemplars with the name and labels of their rows."""
        for version in islice(every_version(self._registry), self._max_versions):
            for number, exemplar in version.statistics.exemplars.items():
                bound = seconds_bound(number)
                yield f"{REQUEST_SECONDS}_bucket{{{_labels(version)}{bound}", exemplar

    async def _texts(self) -> list[str]:
        """Return all metrics except those of the process, in parts.

        The event loop serves requests meanwhile: the rows of one version are consistent with each
        other, those of different versions need not be.
        """
        lines: list[list[str]] = [[family.head] for family in OF_VERSIONS]
        others: list[VersionReading] = []
        generations: list[GenerationReading] = []
        for number, version in enumerate(every_version(self._registry)):
            if number % _VERSIONS_AT_A_TIME == _VERSIONS_AT_A_TIME - 1:
                await asyncio.sleep(0)
            reading = self._reading(version)
            if reading.generation is not None:
                generations.append(reading.generation)
            if number < self._max_versions:
                _add(lines, _labels(version), reading)
            else:
                others.append(reading)
        if others:
            self._add_others(lines, others)
        lines[_LOAD_FAILURES_AT] += (
            f'{LOAD_FAILURES}{{model="{escape(model)}",version=""}} {count}\n'
            for model, count in self._failed_loads.items()
        )
        lines[_FAILURE_AT] += self._failed_models()
        parts = []
        for family_lines in lines:
            await asyncio.sleep(0)
            parts.append("".join(family_lines))
        parts += [self._models(), self._of_server(), _of_generators(generations)]
        if self._of_code is not None:
            parts.append(written(self._of_code))
        return parts

    def _failed_models(self) -> Iterator[str]:
        """Yield the rows of models that failed before any version was known."""
        for model in sorted(self._registry.failed.reasons)[: self._max_versions]:
            for one in failing(self._registry, model):
                for _, reason, value in () if one.version else failure_rows(one.reason):
                    yield f'{FAILURE}{{model="{escape(model)}",version=""{reason}}} {value}\n'

    def _reading(self, version: Version) -> VersionReading:
        state, reason = self._registry.shown_state(version)
        ready = int(state == State.READY.public)
        statistics, instance = version.statistics, version.instance
        backlog = NO_BACKLOG if instance is None else instance.backlog(self._now_ns())
        generation = None
        if instance is not None and isinstance(instance.runner, CountsTokens):
            generation = GenerationReading(instance.runner.counts, backlog.pending)
        totals = statistics.totals()
        return VersionReading(
            totals,
            statistics,
            instance,
            ready,
            backlog,
            generation,
            version.executed,
            reason if is_failure(state, reason) else "",
        )

    def _add_others(self, lines: Iterable[list[str]], others: Sequence[VersionReading]) -> None:
        _add(lines, f'model="{SHARED_NAME}",version="{SHARED_NAME}"', together(others))
        if not self._is_logged:
            self._is_logged = True
            _log.warning(
                "metrics of several versions merged",
                series=SHARED_NAME,
                versions=len(others),
                setting="max_metric_versions",
            )

    def _models(self) -> str:
        lines = []
        for family in OF_MODELS:
            lines.append(family.head)
            for model in islice(self._registry.models(), self._max_versions):
                lines += family.lines(f'model="{escape(model.name)}"', model)
        return "".join(lines)

    def _of_server(self) -> str:
        lines = []
        for family in OF_SERVER:
            lines += [family.head, *family.lines("", self._server)]
        if self._shared is not None:
            for held in OF_SHARED:
                lines += [held.head, *held.lines("", self._shared)]
        for own in OF_OBSERVING:
            lines += [own.head, *own.lines("", self._observing)]
        if self._fetching is not None:
            for fetched in OF_FETCHING:
                lines += [fetched.head, *fetched.lines("", self._fetching)]
        if self._programs:
            for kept in OF_PROGRAMS:
                lines += [kept.head, *kept.lines("", self._programs)]
        return "".join(lines)


def _of_generators(readings: Sequence[GenerationReading]) -> str:
    reading = GenerationReading.sum_of(readings)
    lines = ([family.head, *family.lines("", reading)] for family in OF_GENERATORS)
    return "".join(line for of_family in lines for line in of_family)


def _labels(version: Version) -> str:
    return f'model="{escape(version.model)}",version="{escape(version.number)}"'


def _add(lines: Iterable[list[str]], labels: str, reading: VersionReading) -> None:
    for family, family_lines in zip(OF_VERSIONS, lines, strict=True):
        family_lines.extend(family.lines(labels, reading))


def together(readings: Sequence[VersionReading]) -> VersionReading:
    """Return the sums over several versions, without an instance."""
    counts = [reading.statistics for reading in readings]
    return VersionReading(
        sum_of([reading.totals for reading in readings]),
        LoadCounts(
            sum(count.loads for count in counts),
            sum(count.load_failures for count in counts),
            sum(count.unloads for count in counts),
        ),
        None,
        sum(reading.ready for reading in readings),
        Backlog.together([reading.backlog for reading in readings]),
        GenerationReading.together([reading.generation for reading in readings]),
    )
