"""The core objects that transports are built from."""

from dataclasses import dataclass

from xlaserve.app.observing import Observing
from xlaserve.concurrency.others import NOBODY, Others
from xlaserve.concurrency.workers import Workers
from xlaserve.grpc.http2.limits import Shared
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.control import ModelControl
from xlaserve.residence.platforms.predictions import FileReader
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
    """The server's core objects, created and owned by `Application`; transports only use them."""

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
    """Replays answers to requests with identical bytes; None without a response cache."""
    gates: Gates
    access: AccessControl
    shared: Shared
    """Objects shared by connections: the memory ledger, and the pool for long messages."""
    file_reader: FileReader
    of_code: ModelMetrics
    """Metrics reported by the models' own code."""
    tracing: Tracing
    observing: Observing
    history: History
    events: Events
    others: Others = NOBODY
    """The other processes of the server."""
