"""Cached locations of a form's tensors in shared memory."""

from typing import Any, NamedTuple

import numpy as np

from xlaserve.serving.infer_call import InferCall, ShapeKey, Tensors
from xlaserve.serving.inference import InferRequest
from xlaserve.serving.inputs.output_forms import OutputForms
from xlaserve.serving.inputs.shared_memory import Regions, SharedRegion
from xlaserve.serving.inputs.shared_tensors import REGION, SharedInputs
from xlaserve.serving.stations.station import Served
from xlaserve.tensors import Shape, Tensor, TensorSpec, aligned_bytes

_DECODED = "bO"
"""Dtype kinds whose elements must be checked for each request: BOOL and BYTES."""


class _Known(NamedTuple):
    """One input and its location."""

    region: SharedRegion
    offset: int
    size: int
    dtype: "np.dtype[Any]"
    shape: Shape
    is_view: bool


class KnownPlaces:
    """Validation results of a request, reused for later requests of the same form.

    `Regions` caches it, and clears the cache whenever regions change, so its regions are
    registered. It holds no permission: that depends on each call.
    """

    def __init__(
        self,
        checked_by: object,
        request: InferRequest,
        call: InferCall,
        shared: SharedInputs | None,
        forms: OutputForms | None,
    ) -> None:
        self.checked_by = checked_by
        """The `QuickCheck` that has accepted the form."""
        self.copied_bytes = 0 if shared is None else shared.copied_bytes
        """Bytes of memory needed to read the inputs."""
        self.has_views = shared is not None and shared.has_views
        self.rows: int = call.rows
        self.key: ShapeKey = call.key
        self.chosen: tuple[TensorSpec, ...] | None = call.chosen
        self.forms = forms
        places = {} if shared is None else shared.places
        self._inputs: list[_Known | None] = [None] * len(request.inputs)
        for index, (place, is_view) in places.items():
            data = request.inputs[index].data
            known = (place.region, place.offset, place.size, data.dtype, data.shape, is_view)
            self._inputs[index] = _Known(*known)
        self.read_from = () if shared is None else shared.regions
        """Regions of the inputs."""
        regions = [*self.read_from, *(() if forms is None else forms.regions)]
        self.regions: list[SharedRegion] = list({id(region): region for region in regions}.values())

    @classmethod
    def learn(
        cls,
        regions: Regions,
        instance: Served,
        request: InferRequest,
        call: InferCall,
        shared: SharedInputs | None,
    ) -> None:
        """Cache the locations of a request's tensors, if later requests of its form can reuse them.

        The request must have been validated and read in this event-loop iteration. Skipped if later
        requests need more checks than reading their inputs.
        """
        form, forms, info = request.form, call.shaping, instance.info
        if form is None or (shared is None and forms is None):
            return
        if (
            (forms is not None and not (isinstance(forms, OutputForms) and forms.are_places))
            or info.takes_tensor_parameters
            or len(request.inputs) != len(info.inputs)
        ):
            return
        places = {} if shared is None else shared.places
        for index, tensor in enumerate(request.inputs):
            # If a thread has read it, the region may have been unregistered in the meantime.
            if REGION in tensor.parameters and (
                index not in places or tensor.data.dtype.kind in _DECODED
            ):
                return
        known = cls(instance.quick, request, call, shared, forms)
        if regions.are_registered(known.regions):  # the cache would keep another one alive
            regions.known.keep(form, known)

    def read(self, request: InferRequest) -> Tensors:
        """Return the current inputs; raises InvalidRegion if a file was truncated."""
        inputs: dict[str, Tensor] = {}
        for tensor, known in zip(request.inputs, self._inputs, strict=True):
            if known is None:
                inputs[tensor.name] = tensor.data
                continue
            region, offset, size, dtype, shape, is_view = known
            if is_view:
                data = region.view(offset, size)
            else:
                data = aligned_bytes(size)
                region.read(offset, data)
                data.flags.writeable = False
            inputs[tensor.name] = np.ndarray(shape, dtype, data.data)
        return inputs
