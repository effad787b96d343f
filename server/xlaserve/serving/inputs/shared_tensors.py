"""Tensors of requests in shared memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from xlaserve.errors import InvalidTensor
from xlaserve.serving import parameters
from xlaserve.serving.call import Call
from xlaserve.serving.inference import (
    InferInput,
    InferOutput,
    InferRequest,
    PlacedOutput,
    RequestedOutput,
    SharedInput,
)
from xlaserve.serving.inputs.images import unpack_bytes_or_image
from xlaserve.serving.inputs.shared_memory import Regions, SharedRegion
from xlaserve.tensors import (
    BYTES,
    Buffer,
    Parameter,
    TensorDataError,
    aligned_bytes,
    describe,
    element_count,
    from_bytes,
    to_bytes,
)

REGION = "shared_memory_region"
_OFFSET = "shared_memory_offset"
_SIZE = "shared_memory_byte_size"

AT_ONCE_BYTES = 256 << 10
"""Inputs up to this size are read on the event loop, larger ones on a thread."""


@dataclass(frozen=True, slots=True)
class Place:
    """A byte range of a region."""

    region: SharedRegion
    offset: int
    size: int


class _Finder:
    """Resolves the byte ranges that a request's tensors refer to."""

    def __init__(self, model: str, regions: Regions, call: Call) -> None:
        self._model = model
        self._regions = regions
        self._call = call

    def find(self, kind: str, tensor: str, given: Mapping[str, Parameter]) -> Place:
        """Return the byte range given by a tensor's parameters; raises an InvalidRequest."""
        table = parameters.INPUT if kind == "input" else parameters.OUTPUT
        parameters.check_tensor(self._model, kind, tensor, table, given)
        if _SIZE not in given:
            expected = f"a {_SIZE} with its {REGION}"
            raise InvalidTensor(self._model, kind, tensor, expected, "none")
        region = self._regions.find(self._call.peer, str(given[REGION]), self._call)
        place = Place(region, int(given.get(_OFFSET, 0)), int(given[_SIZE]))
        region.check(place.offset, place.size)
        return place


class SharedInputs:
    """Shared-memory inputs of a request, located but not yet read."""

    def __init__(self, request: InferRequest, regions: Regions, call: Call) -> None:
        """Raises an InvalidRequest if a range exceeds its region or has the wrong size."""
        self._request = request
        self.places: dict[int, tuple[Place, bool]] = {}
        """Byte range of each input by index, and whether it is used in place."""
        self.copied_bytes = 0
        """Bytes of memory needed to copy the inputs."""
        self.has_views = False
        """Whether any inputs are used in place, where the client may change them."""
        finder, in_place = _Finder(request.model_name, regions, call), regions.policy.in_place
        for index, tensor in enumerate(request.inputs):
            if isinstance(tensor, SharedInput):
                place = finder.find("input", tensor.name, tensor.parameters)
                self._check_size(tensor, place.size)
                # BYTES elements are parsed from a copy, which must not change meanwhile.
                is_view = in_place and place.region.can_map and tensor.datatype is not BYTES
                self.places[index] = place, is_view
                if is_view:
                    self.has_views = True
                else:
                    self.copied_bytes += place.size

    @property
    def regions(self) -> tuple[SharedRegion, ...]:
        """Return the regions of the inputs."""
        return tuple(place.region for place, _ in self.places.values())

    def read(self) -> InferRequest:
        """Return the request with its inputs read from shared memory; thread-safe.

        Raises InvalidRegion if a file was truncated, and InvalidTensor if the bytes are not a valid
        tensor.
        """
        inputs = [*self._request.inputs]
        for index, (place, is_view) in self.places.items():
            inputs[index] = self._read(inputs[index], place, is_view=is_view)
        return structs.replace(self._request, inputs=tuple(inputs))

    def _read(self, tensor: InferInput, place: Place, *, is_view: bool) -> InferInput:
        assert isinstance(tensor, SharedInput)
        try:
            if is_view:
                data = place.region.view(place.offset, place.size)
            else:
                data = aligned_bytes(place.size)
                place.region.read(place.offset, data)
                data.flags.writeable = False
            if tensor.datatype is BYTES:
                array = unpack_bytes_or_image(tensor.shape, data.data)
            else:
                array = from_bytes(tensor.datatype, tensor.shape, data.data)
        except TensorDataError as error:
            raise self._invalid(tensor, error) from error
        return InferInput(tensor.name, tensor.datatype, array, tensor.parameters)

    def _check_size(self, tensor: SharedInput, size: int) -> None:
        if tensor.datatype is BYTES:
            return  # the size follows from the elements
        try:
            expected = element_count(tensor.shape) * tensor.datatype.itemsize
        except TensorDataError as error:
            raise self._invalid(tensor, error) from error
        if size != expected:
            text = f"a {_SIZE} of {expected} bytes for {describe(tensor.datatype, tensor.shape)}"
            raise self._invalid(tensor, TensorDataError(text, f"{size} bytes"))

    def _invalid(self, tensor: InferInput, error: TensorDataError) -> InvalidTensor:
        model = self._request.model_name
        return InvalidTensor(model, "input", tensor.name, error.expected, error.got)


class OutputPlaces:
    """Shared-memory locations of one request's outputs."""

    def __init__(
        self, model: str, outputs: Sequence[RequestedOutput], regions: Regions, call: Call
    ) -> None:
        """Raises an InvalidRequest if a range exceeds its region."""
        self._model = model
        finder = _Finder(model, regions, call)
        self._places = {
            output.name: finder.find("output", output.name, output.parameters)
            for output in outputs
            if REGION in output.parameters
        }

    @property
    def regions(self) -> list[SharedRegion]:
        """Return the regions of the outputs."""
        return [place.region for place in self._places.values()]

    def write(self, outputs: Sequence[InferOutput]) -> tuple[InferOutput, ...]:
        """Write outputs to shared memory if requested, and return all outputs for the response.

        Raises InvalidTensor if an output exceeds its range, and InvalidRegion if the file was
        truncated.
        """
        places = self._places
        return tuple(
            [
                self._write(output, places[output.name]) if output.name in places else output
                for output in outputs
            ]
        )

    def _write(self, output: InferOutput, place: Place) -> PlacedOutput:
        raw: Buffer = to_bytes(output.datatype, output.data)
        if len(raw) > place.size:
            raise InvalidTensor(
                self._model,
                "output",
                output.name,
                f"a {_SIZE} of at least {len(raw)} bytes to hold the results",
                f"{place.size} bytes",
            )
        if place.region.shares_memory_with(output.data):
            raw = bytes(raw)  # a view of the same region, which may overlap
        place.region.write(place.offset, [raw])
        return PlacedOutput(output.name, output.datatype, output.data)
