"""Request inputs and outputs in shared memory."""

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
"""Size of inputs up to which they are read on the event loop."""


@dataclass(frozen=True, slots=True)
class Place:
    """Some bytes of a region."""

    region: SharedRegion
    offset: int
    size: int


class _Finder:
    """Finds the places that the tensors of one request name."""

    def __init__(self, model: str, regions: Regions, call: Call) -> None:
        self._model = model
        self._regions = regions
        self._call = call

    def find(self, kind: str, tensor: str, given: Mapping[str, Parameter]) -> Place:
        """Return the bytes that the parameters of a tensor name; raises an InvalidRequest."""
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
    """Inputs of a request in shared memory, located and not yet read."""

    def __init__(self, request: InferRequest, regions: Regions, call: Call) -> None:
        """Raises an InvalidRequest for a range outside of a region, or of a wrong size."""
        self._request = request
        self.places: dict[int, tuple[Place, bool]] = {}
        """Where each input is, and whether it is read in place."""
        self.copied_bytes = 0
        """Bytes of memory that it takes to read them."""
        self.has_views = False
        """Whether some are read in place, where their client may change them."""
        finder, in_place = _Finder(request.model_name, regions, call), regions.policy.in_place
        for index, tensor in enumerate(request.inputs):
            if isinstance(tensor, SharedInput):
                place = finder.find("input", tensor.name, tensor.parameters)
                self._check_size(tensor, place.size)
                # Elements of BYTES are copied from the whole of them, which may not change then.
                is_view = in_place and place.region.can_map and tensor.datatype is not BYTES
                self.places[index] = place, is_view
                if is_view:
                    self.has_views = True
                else:
                    self.copied_bytes += place.size

    def read(self) -> InferRequest:
        """Return the request with the tensors that are in shared memory now; for any thread.

        Raises InvalidRegion for a region that was truncated, InvalidTensor for bytes that are no
        such tensor.
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
            return  # its elements say it
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
    """The places in shared memory of the outputs of one request."""

    def __init__(
        self, model: str, outputs: Sequence[RequestedOutput], regions: Regions, call: Call
    ) -> None:
        """Raises an InvalidRequest for a place outside of a region."""
        self._model = model
        finder = _Finder(model, regions, call)
        self._places = {
            output.name: finder.find("output", output.name, output.parameters)
            for output in outputs
            if REGION in output.parameters
        }

    @property
    def regions(self) -> list[SharedRegion]:
        """Return the regions that they are in."""
        return [place.region for place in self._places.values()]

    def write(self, outputs: Sequence[InferOutput]) -> tuple[InferOutput, ...]:
        """Write the outputs that have a place, and return all as they are to be answered.

        Raises InvalidTensor where one is longer than its place, InvalidRegion where the file is too
        short by now.
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
            raw = bytes(raw)  # an input that the model handed back, where it may overlap
        place.region.write(place.offset, [raw])
        return PlacedOutput(output.name, output.datatype, output.data)
