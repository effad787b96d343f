"""Models that another process of the server executes."""

from typing import Protocol, runtime_checkable

from xlaserve.serving.stations.station import Served, Station


@runtime_checkable
class Elsewhere(Protocol):
    """A model that another process has loaded, which queues and counts its requests."""

    def station(self, instance: Served) -> Station:
        """Return what passes requests on to that process."""
        ...
