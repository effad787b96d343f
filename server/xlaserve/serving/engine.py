"""The inference engine: find the model, check the request, pass it to its station."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from xlaserve.concurrency.host import HostThreads
from xlaserve.errors import BudgetExhausted, MissingInputs, XlaserveError
from xlaserve.errors.panics import ENDS
from xlaserve.runtime.loaded import ModelInfo, Value
from xlaserve.runtime.wrappers.optional_inputs import completed
from xlaserve.serving.access.sight import require_seen, require_seen_now, without_hidden
from xlaserve.serving.answers import deliver
from xlaserve.serving.call import current_call
from xlaserve.serving.checks import check_inputs, check_outputs
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import AwaitedInfer, InferCall, ServedVersion, ShapeKey, Tensors
from xlaserve.serving.inference import InferRequest, InferResponse, SharedInput
from xlaserve.serving.inputs.image_files import DEFAULT_LIMITS, ImageLimits
from xlaserve.serving.inputs.images import AT_NO_COST_BYTES, EncodedImages, find_images
from xlaserve.serving.inputs.known_places import KnownPlaces
from xlaserve.serving.inputs.output_forms import OutputForms, asks_for_form
from xlaserve.serving.inputs.shared_memory import Regions
from xlaserve.serving.inputs.shared_tensors import AT_ONCE_BYTES, SharedInputs
from xlaserve.serving.made_arrays import SHORT_BYTES, hold_made, reserve_made
from xlaserve.serving.parameters import of_tensors
from xlaserve.serving.stations.station import Served, Working
from xlaserve.tensors import Tensor

_SHARED = "the inputs in shared memory"

ResolvedModel: TypeAlias = tuple[ServedVersion, Served]
"""The model version that answers, and the instance that executes it."""


class Residents(Protocol):
    """The registry of loaded models."""

    def resolve(self, name: str, number: str = "") -> ResolvedModel:
        """Return the requested version, or the newest one if `number` is empty.

        Raises ModelNotFound or ModelNotReady.
        """
        ...


class Engine:
    """Entry point of all inferences: finds the model, checks the call, starts it."""

    def __init__(
        self,
        residents: Residents,
        gates: Gates,
        threads: HostThreads,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
        image_limits: ImageLimits = DEFAULT_LIMITS,
        regions: Regions | None = None,
    ) -> None:
        self._residents = residents
        self._gates = gates
        self._threads = threads
        self._clock = clock
        self._image_limits = image_limits
        self.regions = regions or Regions()
        """Registered shared-memory regions."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one request (V2 protocol, Inference), as part of the current call if there is one.

        Raises ModelNotFound, ModelNotReady, an InvalidRequest that names the tensor, Overloaded,
        QueueTimeout, OutOfMemory, or ShuttingDown.
        """
        current = current_call.get()
        if isinstance(current, AwaitedInfer) and current.is_new:
            call = current
            call.notifies_later = True  # `Gates.passing` notifies the observers
        else:
            call = AwaitedInfer.within(current)
        self.begin(call, request)
        return await call.answered()

    def begin(
        self, call: InferCall, request: InferRequest, found: ResolvedModel | None = None
    ) -> None:
        """Answer a call, now or later; raises nothing. Admits the call if it has not been admitted.

        `found` is the resolved model, if the caller has it; it must come from the same iteration of
        the event loop, since after an await the model may have been unloaded.
        """
        try:
            if not call.has_begun:
                self._gates.admit(call)
            call.started_ns = self._clock()
            call.id = request.id
            if request.parameters:
                call.parameters = request.parameters
            # Set here because every request passes here, whichever way its transport parsed it.
            call.typed = request.typed
            if found is None:
                name = call.model = request.model_name
                if call.sight is not None:
                    require_seen(call, name, request.model_version)
                version, instance = self._residents.resolve(name, request.model_version)
                call.found = version
                call.instance = instance
                call.admission = version.admission
                call.is_found = True
            else:
                _, instance = found
            ordinary = instance.quick.inputs(request)
            if ordinary is not None:
                call.inputs, call.rows = ordinary
                for check in self._gates.of_model:
                    check(call)
                instance.station.begin(call)
            else:
                self._check_and_begin(call, instance, request)
        except BaseException as error:
            _fail(call, error)
        if not call.has_ended:
            call.count()
            if call.deadline is not None:
                call.expire_in_time()

    def find(self, call: InferCall, name: str, version: str = "") -> ResolvedModel:
        """Resolve the model of a call; the model's statistics count the call if it fails later.

        Raises ModelNotFound or ModelNotReady.
        """
        call.model, call.version = name, version
        require_seen(call, name, version)
        try:
            found = self._residents.resolve(name, version)
        except XlaserveError as error:
            raise without_hidden(call, error, error.steps) from None
        _find(call, *found)
        return found

    def _begin_known(self, call: InferCall, instance: Served, request: InferRequest) -> bool:
        """Begin a call whose inputs are at known locations in shared memory.

        Returns False, with nothing changed, if the request needs the general path.
        """
        known = None if request.form is None else self.regions.known.get(request.form)
        if (
            known is None
            or known.checked_by is not instance.quick
            or not self.regions.may_use_again(call, known.regions)
        ):
            return False
        size = known.copied_bytes
        account = call.peer.account if size else None
        if account is not None and (size > SHORT_BYTES or account.ledger.is_pressed):
            reserve_made(call, size, _SHARED)
            account = None
        call.is_volatile, call.read_from = known.has_views, known.read_from
        call.inputs = known.read(request)
        call.rows, call.key = known.rows, known.key
        call.chosen, call.shaping = known.chosen, known.forms
        for check in self._gates.of_model:
            check(call)
        instance.station.begin(call)
        if account is not None and not call.has_ended:
            # As for short messages, memory is charged only if the call is not answered immediately.
            hold_made(call, size)
        return True

    def _check_and_begin(
        self,
        call: InferCall,
        instance: Served,
        request: InferRequest,
        shared: SharedInputs | None = None,
    ) -> None:
        """Apply all checks, and begin a call.

        `shared` describes inputs already read from shared memory in this event-loop iteration.
        """
        if shared is None and self.regions.known and self._begin_known(call, instance, request):
            return
        name, info = request.model_name, instance.info
        if shared is None and SharedInput in map(type, request.inputs):
            self._read_shared(call, instance, SharedInputs(request, self.regions, call))
            return
        is_known = request.form is not None and request.form.checked_by is instance.quick
        images = None if is_known else self._check(call, instance, request)
        if request.outputs:
            if request.form is not None and is_known:
                call.chosen = request.form.chosen
            if asks_for_form(request.outputs):
                labels = partial(self._labels, instance)
                call.shaping = OutputForms(
                    name, info, request.outputs, labels, regions=self.regions, call=call
                )
        if not is_known:
            instance.quick.parameters.note(request)
            if request.form is not None and images is None:
                request.form.chosen = call.chosen
                request.form.checked_by = instance.quick
        if info.takes_tensor_parameters:
            call.tensor_parameters = of_tensors(request)
        call.inputs = {tensor.name: tensor.data for tensor in request.inputs}
        self._gates.admit_to_model(call)
        if images is not None:
            self._decode(call, instance, images, AT_NO_COST_BYTES)
            return
        _describe(call, info)
        KnownPlaces.learn(self.regions, instance, request, call, shared)
        instance.station.begin(call)

    def _check(
        self, call: InferCall, instance: Served, request: InferRequest
    ) -> EncodedImages | None:
        """Apply the checks of a request's contents; return the encoded images in its inputs.

        Everything except images depends on the form alone, so a form that this instance has
        accepted is not checked again.
        """
        name, info = request.model_name, instance.info
        images = find_images(request, info, instance.config, self._image_limits)
        instance.quick.parameters.check(request)
        check_inputs(name, info, images.promised() if images else request)
        if request.outputs:
            call.chosen = check_outputs(name, info, request.outputs)
        return images

    def _labels(self, instance: Served, output: str) -> Sequence[bytes]:
        """Return the labels of an output, if necessary from the ensemble step that produces it."""
        config = instance.config
        found = config.labels.get(output, ())
        for step in config.steps if not found else ():
            for name, tensor in step.output_map.items():
                if tensor == output:
                    _, other = self._residents.resolve(step.model_name, step.model_version)
                    found = other.config.labels.get(name, ())
        return found

    def _read_shared(self, call: InferCall, instance: Served, shared: SharedInputs) -> None:
        """Read a call's inputs from shared memory, on a thread if they are large."""
        size = shared.copied_bytes
        call.is_volatile = shared.has_views
        call.read_from = shared.regions
        reserve_made(call, size, _SHARED)
        if size <= AT_ONCE_BYTES:
            self._check_and_begin(call, instance, shared.read(), shared)
            return

        def has_read(found: InferRequest | BaseException) -> None:
            if call.has_ended:
                return
            call.place = None
            if isinstance(found, BaseException):
                deliver([call], found)
                return
            try:
                self._check_and_begin(call, instance, found)
            except ENDS:
                raise
            except BaseException as error:
                deliver([call], error)

        call.wait_at(Working(self._threads.start(shared.read, has_read)))

    def _decode(self, call: InferCall, instance: Served, images: EncodedImages, most: int) -> None:
        """Decode the images of a call on a thread, up to `most` bytes."""

        def decoded(found: dict[str, Tensor] | int | BaseException) -> None:
            if call.has_ended:
                return
            if isinstance(found, BaseException):
                deliver([call], found)
            elif isinstance(found, int):
                self._reserve_and_decode(call, instance, images, found)
            else:
                if most == AT_NO_COST_BYTES:
                    hold_made(call, sum(tensor.nbytes for tensor in found.values()))
                self._begin_decoded(call, instance, found)

        images.is_wanted = lambda: not call.has_ended
        decode = partial(images.decode_within, most)
        call.wait_at(Working(self._threads.start(decode, decoded)))

    def _reserve_and_decode(
        self, call: InferCall, instance: Served, images: EncodedImages, size: int
    ) -> None:
        """Reserve `size` bytes for the images, then decode them."""
        try:
            reserve_made(call, size, "the decoded images")
        except BudgetExhausted as error:
            deliver([call], error)
            return
        self._decode(call, instance, images, size)

    def _begin_decoded(self, call: InferCall, instance: Served, images: dict[str, Tensor]) -> None:
        """Execute a call whose images have been decoded."""
        call.place = None
        call.inputs = {**call.inputs, **images}
        try:
            _describe(call, instance.info)
            instance.station.begin(call)
        except ENDS:
            raise
        except BaseException as error:
            deliver([call], error)

    # --- called by ensembles ---

    def resolve(self, name: str, number: str) -> ResolvedModel:
        """Return the version that answers; raises ModelNotFound or ModelNotReady."""
        return self._residents.resolve(name, number)

    def begin_step(
        self, call: InferCall, version: ServedVersion, instance: Served, inputs: Tensors
    ) -> None:
        """Start a step of an ensemble; the plan has validated its inputs and set its parameters."""
        try:
            self._gates.admit(call)
            call.model = version.model
            _find(call, version, instance)
            call.started_ns = self._clock()
            if isinstance(call.parent, InferCall):
                call.is_volatile = call.parent.is_volatile
            call.inputs = inputs
            _describe(call, instance.info)
            if not inputs and isinstance(call.parent, InferCall):
                call.rows = call.parent.rows  # the row count of the ensemble's other steps
            self._gates.admit_to_model(call)
            instance.station.begin(call)
        except BaseException as error:
            _fail(call, error)
        if not call.has_ended:
            call.count()

    def begin_passed(self, call: InferCall, version: ServedVersion, instance: Served) -> None:
        """Answer a call that another process has already checked, now or later; raises nothing.

        The call must have inputs, rows, key and `started_ns`.
        """
        try:
            self._gates.admit(call)
            call.model = version.model
            _find(call, version, instance)
            self._gates.admit_to_model(call)
            instance.station.begin(call)
        except BaseException as error:
            _fail(call, error)
        if not call.has_ended:
            call.count()
            if call.deadline is not None:
                call.expire_in_time()

    # --- called by transports before they parse tensors ---

    def require(self, name: str, version: str = "") -> AbstractContextManager[ModelInfo]:
        """Raise the error that `infer` would raise for a missing or unavailable model.

        A transport calls this before it parses tensors, so that a missing model is reported before
        a malformed tensor. The context manager yields the model's description, and counts an error
        raised in its block as a failed request of the model.
        """
        require_seen_now(name, version)
        return _Reading(*self._residents.resolve(name, version))

    def info(self, name: str, version: str = "") -> ModelInfo:
        """Return the description of a model; raises the errors of `infer`."""
        require_seen_now(name, version)
        return self._residents.resolve(name, version)[1].info


class _Reading(AbstractContextManager[ModelInfo]):
    """Context in which a request is parsed; counts errors in the model's statistics."""

    def __init__(self, version: ServedVersion, instance: Served) -> None:
        self._version = version
        self._info = instance.info

    def __enter__(self) -> ModelInfo:
        return self._info

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._version.statistics.failed(error, 0)


def _find(call: InferCall, version: ServedVersion, instance: Served) -> None:
    call.found = version
    call.instance = instance
    call.admission = version.admission
    call.is_found = True


def _fail(call: InferCall, error: BaseException) -> None:
    """Fail a call with an exception; if the call has already ended, raise the exception."""
    if call.has_ended or isinstance(error, ENDS):
        raise error
    call.place = None
    steps = error.steps if isinstance(error, XlaserveError) else ()
    call.fail(without_hidden(call, error, steps))


def _describe(call: InferCall, info: ModelInfo) -> None:
    """Set the rows and the batching key of a call, and fill in default inputs."""
    inputs = call.inputs
    call.rows = rows_of(info, inputs)
    if len(inputs) < len(info.inputs):
        rows = call.rows if info.max_batch_size else 0
        call.inputs = completed(inputs, info.inputs, info.optional, rows)
        # Requests that omit different inputs do not share a batch, as in Triton.
        left_out = tuple([spec.name for spec in info.inputs if spec.name not in inputs])
        call.key = (left_out, *key_of(info, call.inputs))
        if info.echoes:
            _leave_out(call, info)
    else:
        call.key = key_of(info, inputs)


def _leave_out(call: InferCall, info: ModelInfo) -> None:
    """Drop outputs of omitted inputs; raises MissingInputs if no output remains."""
    wanted = call.chosen or info.outputs
    missing = [name for output in wanted if (name := info.echoes[output.name]) not in call.inputs]
    if len(missing) == len(wanted):
        count = len(info.inputs)
        raise MissingInputs(call.instance.model, count, len(call.inputs), missing, optional=count)
    call.chosen = tuple(spec for spec in wanted if info.echoes[spec.name] in call.inputs)


def rows_of(info: ModelInfo, inputs: Mapping[str, Value]) -> int:
    """Return the row count of a request's inputs; 1 for a model without a batch dimension."""
    if not info.max_batch_size or not inputs:
        return 1
    first = next(iter(inputs.values()))
    return int(first.shape[0]) if isinstance(first, np.ndarray) else first.rows


def key_of(info: ModelInfo, tensors: Tensors) -> ShapeKey:
    """Return the batching key: requests with equal keys may share a batch."""
    if not info.is_ragged:
        return ()
    compared = [s.name for s in info.inputs if s.name in tensors and s.name not in info.ragged]
    return tuple([tensors[name].shape[1:] for name in compared])
