"""Assembles the HTTP server."""

from collections.abc import Callable, Mapping

from xlaserve.app import extensions
from xlaserve.app.core import Core
from xlaserve.app.extensions import Shown
from xlaserve.app.listeners import METRICS_ON_HTTP
from xlaserve.errors import InvalidSettings
from xlaserve.grpc.runner import Runner
from xlaserve.http.connection.bodies import BodyLimits
from xlaserve.http.connection.exchange import OtherProtocol
from xlaserve.http.connection.origins import Origins
from xlaserve.http.connection.server import HttpLimits, HttpServer
from xlaserve.http.json.json_tensors import JsonRules
from xlaserve.http.metrics.metrics import Metrics
from xlaserve.http.routing import MakeError, Route, RouteTable
from xlaserve.http.sagemaker.sagemaker import sagemaker_routes
from xlaserve.http.threads import OffLoop
from xlaserve.http.v2.generate import GenerateRoutes
from xlaserve.http.v2.health import HealthRoutes
from xlaserve.http.v2.inference import InferenceRoutes
from xlaserve.http.v2.repository import RepositoryRoutes
from xlaserve.http.v2.runtime_settings import RuntimeSettingsRoutes
from xlaserve.http.v2.shared_memory import SharedMemoryRoutes
from xlaserve.residence.platforms.multi_model import MultiModelContainer
from xlaserve.residence.platforms.runtime import ModelRuntime


def http_server(core: Core, routes: RouteTable, grpc: Runner | None = None) -> HttpServer:
    """Create the HTTP server, from the settings; it does not listen yet.

    `grpc` is the runner for other protocols on the HTTP port, such as gRPC-Web, or None.
    """
    settings = core.settings
    limits = HttpLimits(
        settings.max_http_connections,
        settings.max_http_header_bytes,
        settings.http_idle_seconds,
        BodyLimits(
            settings.max_message_bytes,
            settings.max_http_chunks,
            settings.message_timeout_seconds,
        ),
        settings.max_http_heads,
        settings.answer_timeout_seconds,
        settings.preface_seconds,
        settings.compress_answers,
    )
    return HttpServer(
        routes,
        limits,
        core.workers.host,
        core.shared,
        core.gates,
        origins=Origins.of(settings),
        other=None if grpc is None else _protocol(core, grpc),
    )


def _protocol(core: Core, grpc: Runner) -> OtherProtocol | None:
    rows = extensions.rows(core.settings.extension)
    found = [row for row in rows if row.protocol is not None]
    if len(found) > 1:
        names = " and ".join(row.name for row in found)
        raise InvalidSettings(
            "extension", "at most one protocol besides REST on the HTTP port", names
        )
    make = found[0].protocol if found else None
    return None if make is None else make(core, grpc)


def http_routes(
    core: Core, connections: Mapping[str, Callable[[], int]], mesh: ModelRuntime | None = None
) -> RouteTable:
    """Return all HTTP routes; `connections` maps protocols to their number of open connections.

    `mesh` is the runtime that ModelMesh controls, for the status page.
    """
    depth = core.settings.max_json_depth
    threads = OffLoop(core.workers.host)
    json_rules = JsonRules(core.settings.strict_json, core.settings.json_surrogates)
    inference = InferenceRoutes(
        core.description,
        core.engine,
        core.gates,
        core.control,
        threads,
        max_json_depth=depth,
        json_rules=json_rules,
        max_stream_bytes=core.settings.max_infer_stream_bytes,
        health_bodies=core.settings.health_bodies,
    )
    generate = GenerateRoutes(
        core.engine,
        threads,
        max_json_depth=depth,
        json_rules=json_rules,
        max_stream_bytes=core.settings.max_infer_stream_bytes,
    )
    repository = RepositoryRoutes(core.control, threads, max_json_depth=depth)
    container = MultiModelContainer(
        core.control,
        core.registry,
        core.repository,
        default_model=core.settings.default_model,
    )
    sagemaker = sagemaker_routes(
        container,
        core.engine,
        threads,
        max_json_depth=depth,
        default_accept=core.settings.default_accept,
        json_rules=json_rules,
    )
    added = extensions.rows(core.settings.extension)
    rows = [
        *HealthRoutes(core.control.follower, bodies=core.settings.health_bodies).table(),
        *inference.table(),
        *generate.table(),
        *(route for row in added for route in row.http(core)),
        *repository.table(),
        *sagemaker,
        *(_metrics(core, connections) if core.settings.metrics_endpoint == METRICS_ON_HTTP else ()),
        *SharedMemoryRoutes(core.engine.regions, threads, max_json_depth=depth).table(),
        *RuntimeSettingsRoutes(
            core.control.plane, core.tracing, core.engine, threads, max_json_depth=depth
        ).table(),
    ]
    for row in added:
        rows += row.pages(core, Shown(rows, mesh, container))
    shapes: dict[str, MakeError] = {}
    for row in added:
        shapes |= row.errors()
    return RouteTable(rows, shapes)


def metrics_routes(core: Core, connections: Mapping[str, Callable[[], int]]) -> RouteTable:
    """Return the routes of a separate metrics endpoint: metrics and health."""
    health = HealthRoutes(core.control.follower, bodies=core.settings.health_bodies)
    return RouteTable([*_metrics(core, connections), *health.table()])


def _metrics(core: Core, connections: Mapping[str, Callable[[], int]]) -> list[Route]:
    return Metrics(
        core.registry,
        core.capacity,
        connections,
        core.control.follower.watch,
        abandoned=core.workers.abandoned,
        mappings=core.mappings,
        shared=core.shared,
        of_code=core.of_code,
        observing=core.observing.reading(core.tracing),
        fetching=core.repository.remotes.counts,
        programs=core.compilation.counts,
        failed_loads=core.control.failed_loads,
        stores=lambda: core.repository.remotes.problems,
        max_versions=core.settings.max_metric_versions,
        others=core.others,
    ).table()
