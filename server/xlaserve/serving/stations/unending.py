"""Limits endless answers: they fail some time after their model is unloaded."""

from functools import partial

from xlaserve.errors import ModelNotReady
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.station import Served


class Unending:
    """Fails calls that are still in progress `drain_seconds` after their instance's unload."""

    def __init__(self, instance: Served) -> None:
        self._calls: set[InferCall] = set()
        instance.on_drain_expired(self._cut_off)

    def add(self, call: InferCall) -> None:
        """Record a call until it ends."""
        self._calls.add(call)
        call.hold(partial(self._calls.discard, call))

    def _cut_off(self) -> None:
        because = "its answers continued for longer than drain_seconds"
        for call in tuple(self._calls):
            version = call.found
            call.fail(ModelNotReady(version.model, version.number, "unloading", because))
