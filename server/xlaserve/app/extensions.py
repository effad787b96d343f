"""The table of built-in extensions; any row can be removed, and the server still runs.

Extensions are imported only here, and only when the server is assembled. Other packages can provide
extensions through entry points; the setting `extension` enables them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from xlaserve.app.core import Core
from xlaserve.errors import InvalidSettings
from xlaserve.grpc.runner import Runner
from xlaserve.http.connection.exchange import OtherProtocol
from xlaserve.http.routing import MakeError, Route
from xlaserve.residence.platforms.multi_model import MultiModelContainer
from xlaserve.residence.platforms.runtime import ModelRuntime
from xlaserve.settings.choices import ModelControlMode


@dataclass(frozen=True, slots=True)
class Shown:
    """Information for an extension's status pages."""

    routes: Sequence[Route]
    """Routes of the server and of other extensions."""
    mesh: ModelRuntime | None
    """The runtime that ModelMesh controls; None without ModelMesh."""
    container: MultiModelContainer


@dataclass(frozen=True, slots=True)
class Extension:
    """One extension; its functions are called when a server is assembled."""

    name: str
    http: Callable[[Core], Iterable[Route]] = lambda core: ()
    """Returns the extension's HTTP routes."""
    errors: Callable[[], Mapping[str, MakeError]] = dict
    """Returns a map from path prefixes to functions that format error bodies."""
    pages: Callable[[Core, Shown], Iterable[Route]] = lambda core, shown: ()
    """Returns the routes of status pages, which may list all other routes."""
    protocol: Callable[[Core, Runner], OtherProtocol] | None = None
    """Returns another protocol for the HTTP port, which uses the gRPC runner."""


def _openai(core: Core) -> Iterable[Route]:
    from xlaserve.openai.routes import OpenAiRoutes

    return OpenAiRoutes(
        core.engine,
        core.registry,
        core.workers.host,
        max_json_depth=core.settings.max_json_depth,
        max_stream_bytes=core.settings.max_infer_stream_bytes,
        max_choices=core.settings.max_choices,
        max_embedding_inputs=core.settings.max_embedding_inputs,
    ).table()


def _openai_errors() -> Mapping[str, MakeError]:
    from xlaserve.openai.errors import PREFIXES, error_body

    return dict.fromkeys(PREFIXES, error_body)


def _dashboard(core: Core, shown: Shown) -> Iterable[Route]:
    from xlaserve.http.dashboard.events_page import EventRoutes
    from xlaserve.http.dashboard.history_page import HistoryRoutes
    from xlaserve.http.dashboard.hosting_page import HostingRoutes
    from xlaserve.http.dashboard.model_page import ModelPageRoutes
    from xlaserve.http.dashboard.pages import page_routes
    from xlaserve.residence.platforms.hosting import HostingBoard
    from xlaserve.residence.reports.model_board import ModelBoard
    from xlaserve.residence.reports.status_board import StatusBoard

    settings, others, permits = core.settings, core.others, core.access.permits
    hosting = HostingBoard(
        core.registry,
        core.capacity,
        mesh=shown.mesh,
        container=shown.container if settings.sagemaker else None,
    )
    model_page = ModelPageRoutes(
        ModelBoard(core.registry, core.history.failures),
        core.control.catalog,
        others,
        permits=permits,
        controllable=settings.model_control_mode is ModelControlMode.EXPLICIT,
        grpc_endpoint=settings.grpc_endpoint,
    )
    rows = [
        *HistoryRoutes(core.history, others, permits).table(),
        *EventRoutes(core.events, permits).table(),
        *model_page.table(),
        *HostingRoutes(hosting, others, permits).table(),
    ]
    return rows + page_routes(
        [*shown.routes, *rows],
        StatusBoard(core.control, core.registry, core.capacity, settings.model_control_mode),
        core.description,
        others,
        permits,
        grpc_endpoint=settings.grpc_endpoint,
        platform=hosting.platform,
    )


def _grpc_web(core: Core, runner: Runner) -> OtherProtocol:
    from xlaserve.app.grpc import http2_limits
    from xlaserve.grpc_web.service import GrpcWeb
    from xlaserve.http.threads import OffLoop

    return GrpcWeb(runner, http2_limits(core.settings), OffLoop(core.workers.host))


EXTENSIONS: tuple[Extension, ...] = (
    Extension("openai", http=_openai, errors=_openai_errors),
    Extension("grpc_web", protocol=_grpc_web),
    Extension("dashboard", pages=_dashboard),
)
"""The built-in extensions; their routes are matched in this order."""
GROUP = "xlaserve.extensions"
"""The entry point group for extensions of other packages."""


def rows(names: Sequence[str]) -> Sequence[Extension]:
    """Return the built-in extensions, then the named extensions from other packages.

    Raises InvalidSettings if one is not installed or cannot be imported.
    """
    return [*EXTENSIONS, *(_installed(name) for name in names)]


def _installed(name: str) -> Extension:
    entries = metadata.entry_points(group=GROUP)
    found = {entry.name: entry for entry in entries}.get(name)
    if found is None:
        known = ", ".join(sorted({entry.name for entry in entries})) or "none"
        raise InvalidSettings("extension", f"an installed extension ({known})", name)
    try:
        row = found.load()
    except (Exception, SystemExit) as error:
        text = f"{name}: {found.value}: {type(error).__name__}: {error}"
        raise InvalidSettings("extension", "importable code", text) from error
    if not isinstance(row, Extension):
        got = f"{name}: {found.value} is of {type(row).__name__}"
        raise InvalidSettings("extension", "an Extension object", got)
    return row
