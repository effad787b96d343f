"""The parts of the core that transports are built over."""

from dataclasses import dataclass

from xlaserve.assembly.observing import Observing
from xlaserve.core.events import Events
from xlaserve.core.others import NOBODY, Others
from xlaserve.core.residence.capacity import Capacity
from xlaserve.core.residence.control import ModelControl
from xlaserve.core.residence.history import History
from xlaserve.core.residence.predictions import FilesLook
from xlaserve.core.residence.registry import Registry
from xlaserve.core.residence.repository import Repository
from xlaserve.core.server import ServerDescription
from xlaserve.core.serving.access.control import AccessControl
from xlaserve.core.serving.engine import Engine
from xlaserve.core.serving.gates import Gates
from xlaserve.core.serving.repeats import Repeats
from xlaserve.core.serving.tracing import Tracing
from xlaserve.core.threads.workers import Workers
from xlaserve.models.compilation import Compilation
from xlaserve.models.mappings import Mappings
from xlaserve.models.python.metrics import ModelMetrics
from xlaserve.settings import Settings
from xlaserve.transport.http2.limits import Shared


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
    """Answers that are given again without a look at the request; None without a response cache."""
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
