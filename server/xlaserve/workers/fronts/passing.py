"""The engine's models as a front end sees them, and stations that forward requests."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.station import Served, Station
from xlaserve.workers.fronts.bridge import Bridge
from xlaserve.workers.fronts.records import Extra, Kind, Record, bytes_of

Send = Callable[["PassedModel", InferCall], None]
"""Forwards a call to the engine; raises EngineGone, ProcessSilent or Overloaded."""


class PassedModel:
    """A model that the engine has loaded (an Elsewhere)."""

    def __init__(self, handle: int, info: ModelInfo, bridge: Bridge, send: Send) -> None:
        """`handle` identifies the model's instance on this bridge."""
        self.handle = handle
        self.info = info
        self.bridge = bridge
        self.send = send
        self._inputs = {spec.name: (at, spec.datatype) for at, spec in enumerate(info.inputs)}
        self._outputs = {spec.name: at for at, spec in enumerate(info.outputs)}

    def station(self, instance: Served) -> Station:
        """Return a station that forwards requests to the engine."""
        return Passing(self)

    def stop(self) -> None:
        """Do nothing, since nothing is compiled here."""

    def close(self) -> None:
        """Stop the chat template's process, if there is one; the engine has everything else."""
        generation = self.info.generation
        if generation is not None and generation.text is not None:
            generation.text.close()

    def request(self, number: int, call: InferCall) -> Record:
        """Return the request record for a call, after writing large tensors to the slab."""
        flat: list[Any] = []
        total = 0
        for name, tensor in call.inputs.items():
            at, datatype = self._inputs[name]
            data = bytes_of(datatype, tensor)
            total += len(data)
            flat += (at, tensor.shape, data)
        place = self.bridge.place(flat[2::3], total)
        if place >= 0:
            flat[2::3] = map(len, flat[2::3])
        chosen, peer = call.chosen, call.peer
        return (
            *(Kind.REQUEST, number, self.handle, call.id, place, flat, call.rows, call.key),
            None if chosen is None else [self._outputs[spec.name] for spec in chosen],
            call.started_ns,
            # Equal for calls of one client, as in `client_of`.
            hash(peer.address) if peer.proxy else id(peer.account),
            _extra(call, self.info),
        )


def _extra(call: InferCall, info: ModelInfo) -> dict[str, Any] | None:
    extra: dict[str, Any] = {}
    if call.parameters:
        extra[Extra.PARAMETERS] = dict(call.parameters)
    inputs, outputs = call.tensor_parameters
    if inputs or outputs:
        extra[Extra.INPUT_PARAMETERS] = {name: dict(given) for name, given in inputs.items()}
        extra[Extra.OUTPUT_PARAMETERS] = {name: dict(given) for name, given in outputs.items()}
    if call.deadline is not None:
        extra[Extra.DEADLINE] = call.deadline
    if call.owner:
        extra[Extra.PRINCIPAL] = call.owner
    elif info.generation is not None and (caller := call.caller):
        extra[Extra.CALLER] = caller
    if info.is_decoupled and call.takes_many:
        extra[Extra.TAKES_MANY] = True
        if call.wants_whole:
            extra[Extra.WANTS_WHOLE] = True
    return extra or None


class Passing:
    """A station that forwards every request to the engine, where it is queued."""

    def __init__(self, model: PassedModel) -> None:
        self._model = model

    def pending_since(self) -> Iterator[int]:
        """Yield nothing: the engine counts queued requests."""
        return iter(())

    def begin(self, call: InferCall) -> None:
        """Forward a call to the engine; raises EngineGone, ProcessSilent or Overloaded."""
        self._model.send(self._model, call)

    def retire(self) -> Sequence[InferCall]:
        """Return no calls, since none are queued here."""
        return ()
