"""The parts of the core that transports are built over."""

from dataclasses import dataclass

from xlaserve.app.observing import Observing
from xlaserve.concurrency.others import NOBODY, Others
from xlaserve.concurrency.workers import Workers
from xlaserve.grpc.http2.limits import Shared
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.control import ModelControl
from xlaserve.residence.platforms.predictions import FilesLook
from xlaserve.residence.registry import Registry
from xlaserve.residence.reports.history import History
from xlaserve.residence.repository.repository import Repository
from xlaserve.residence.server import ServerDescription
from xlaserve.runtime.metrics import ModelMetrics
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.mappings import Mappings
from xlaserve.serving.access.control import AccessControl
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.observability.events import Events
from xlaserve.serving.observability.tracing import Tracing
from xlaserve.serving.repeats import Repeats
from xlaserve.settings import Settings


@dataclass(frozen=True, slots=True)
class Core:
    """One of each, made by the composition root; the transports own none of them."""

    settings: Settings
    description: ServerDescription
    workers: Workers
    registry: Registry
    capacity: Capacity
    mappings: Mappings
    compilation: Compilation
    repository: Repository
    control: ModelControl
    engine: Engine
    repeats: Repeats | None
    """Exact repeats answered without parsing; None without a response cache."""
    gates: Gates
    access: AccessControl
    shared: Shared
    """Shared by connections: the ledger, and the memory of long messages."""
    look: FilesLook
    of_code: ModelMetrics
    """Metrics that the code of models reports."""
    tracing: Tracing
    observing: Observing
    history: History
    events: Events
    others: Others = NOBODY
    """The other processes of the server."""
