"""Metrics for Prometheus: statistics of every model version, memory, and the process."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from xlaserve.core.residence.capacity import Capacity
from xlaserve.core.residence.lifecycle import State
from xlaserve.core.residence.monitor import every_version
from xlaserve.core.residence.registry import Registry, Version
from xlaserve.core.residence.watches import RepositoryWatches
from xlaserve.core.serving.call import Operation
from xlaserve.core.threads.abandoned import AbandonedWork
from xlaserve.models.mappings import UNLIMITED, Mappings
from xlaserve.models.python.metrics import ModelMetrics
from xlaserve.transport.http2.limits import Shared
from xlaserve.transport.rest.held_families import OF_SHARED
from xlaserve.transport.rest.messages import HttpRequest, HttpResponse
from xlaserve.transport.rest.metric_families import (
    OF_MODELS,
    OF_SERVER,
    OF_VERSIONS,
    ServerReading,
    VersionReading,
)
from xlaserve.transport.rest.metric_family import escape
from xlaserve.transport.rest.model_families import written
from xlaserve.transport.rest.routing import Body, Route

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of the text format."""

_VERSIONS_AT_A_TIME = 32
"""Versions that are written before requests have their turn again."""


class Metrics:
    """Writes all metrics in Prometheus' text format; holds none of them."""

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
    ) -> None:
        """`of_code` are those that the code of models reports."""
        self._registry = registry
        self._server = ServerReading(capacity, connections, watch, abandoned, mappings)
        self._shared = shared
        self._of_code = of_code
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def table(self) -> list[Route]:
        """Return the row of `GET /metrics`."""
        answer = Body(media_types=(METRICS_TYPE,))
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
        """Answer with all metrics."""
        return HttpResponse(content_type=METRICS_TYPE, parts=await self.parts())

    async def parts(self) -> list[bytes]:
        """Return the text in pieces, one for each family.

        Requests have their turn in between: the rows of one version are of one moment, those of
        different versions are not.
        """
        lines: list[list[str]] = [[family.head] for family in OF_VERSIONS]
        for number, version in enumerate(every_version(self._registry)):
            if number % _VERSIONS_AT_A_TIME == _VERSIONS_AT_A_TIME - 1:
                await asyncio.sleep(0)
            self._add_version(lines, version)
        parts = []
        for family_lines in lines:
            await asyncio.sleep(0)
            parts.append("".join(family_lines).encode())
        parts.append(self._models().encode())
        parts.append(self._of_server().encode())
        if self._of_code is not None:
            parts.append(written(self._of_code).encode())
        parts.append(generate_latest(self._process))
        return parts

    def _add_version(self, lines: Iterable[list[str]], version: Version) -> None:
        labels = f'model="{escape(version.model)}",version="{escape(version.number)}"'
        state, _ = self._registry.shown_state(version)
        reading = VersionReading(
            version.statistics.totals(), version, version.instance, state == State.READY.public
        )
        for family, family_lines in zip(OF_VERSIONS, lines, strict=True):
            family_lines.extend(family.lines(labels, reading))

    def _models(self) -> str:
        lines = []
        for family in OF_MODELS:
            lines.append(family.head)
            for model in self._registry.models():
                lines += family.lines(f'model="{escape(model.name)}"', model)
        return "".join(lines)

    def _of_server(self) -> str:
        lines = []
        for family in OF_SERVER:
            lines += [family.head, *family.lines("", self._server)]
        if self._shared is not None:
            for held in OF_SHARED:
                lines += [held.head, *held.lines("", self._shared)]
        return "".join(lines)
