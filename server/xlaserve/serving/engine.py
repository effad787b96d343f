"""Inference: find the model, check the request, let its station answer."""

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

Found: TypeAlias = tuple[ServedVersion, Served]
"""The version of a model that answers, and the instance that executes it."""


class Residents(Protocol):
    """The registry of loaded models."""

    def resolve(self, name: str, number: str = "") -> Found:
        """Return the version that answers, the newest one where none is asked for.

        Raises ModelNotFound or ModelNotReady.
        """
        ...


class Engine:
    """Has the models of the server answer inferences."""

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
        """Registered shared memory."""

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer one request (V2 protocol, Inference), as part of the call that is answered now.

        Raises ModelNotFound, ModelNotReady, an InvalidRequest that names the tensor, Overloaded,
        QueueTimeout, OutOfMemory, or ShuttingDown.
        """
        current = current_call.get()
        if isinstance(current, AwaitedInfer) and current.is_new:
            call = current
            call.is_told_later = True  # by `Gates.passing`: its handler writes the answer
        else:
            call = AwaitedInfer.within(current)
        self.begin(call, request)
        return await call.answered()

    def begin(self, call: InferCall, request: InferRequest, found: Found | None = None) -> None:
        """Answer a call, now or later; raises nothing. It has passed the gates, or does now.

        The model may be `found` already, in the same turn of the event loop: in another turn it
        may have been unloaded, and who finds it then finds that out.
        """
        try:
            if not call.has_begun:
                self._gates.admit(call)
            call.started_ns = self._clock()
            call.id = request.id
            if request.parameters:
                call.parameters = request.parameters
            # Here, where every request passes: a transport has several ways to read one.
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

    def find(self, call: InferCall, name: str, version: str = "") -> Found:
        """Find the model of a call; if the call fails from then on, the model counts it.

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
        """Begin a call with its tensors where another of its form had them in shared memory.

        False, and nothing has changed, where all of it has to be looked at.
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
        call.is_volatile, call.reads_memory = known.has_views, known.is_shared
        call.inputs = known.read(request)
        call.rows, call.key = known.rows, known.key
        call.chosen, call.shaping = known.chosen, known.forms
        for check in self._gates.of_model:
            check(call)
        instance.station.begin(call)
        if account is not None and not call.has_ended:
            # As with short messages: what is answered at once need not be counted.
            hold_made(call, size)
        return True

    def _check_and_begin(
        self,
        call: InferCall,
        instance: Served,
        request: InferRequest,
        shared: SharedInputs | None = None,
    ) -> None:
        """Apply all rules, and begin a call; `shared` inputs were found in this turn, and read."""
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
        """Apply the rules for what a request is made of; return the images that it has.

        All but these depends on its form alone: what is another of a form that was checked for
        this instance is not checked again.
        """
        name, info = request.model_name, instance.info
        images = find_images(request, info, instance.config, self._image_limits)
        instance.quick.parameters.check(request)
        check_inputs(name, info, images.promised() if images else request)
        if request.outputs:
            call.chosen = check_outputs(name, info, request.outputs)
        return images

    def _labels(self, instance: Served, output: str) -> Sequence[bytes]:
        """Return the labels of an output; an ensemble may have those of its steps."""
        config = instance.config
        found = config.labels.get(output, ())
        for step in config.steps if not found else ():
            for name, tensor in step.output_map.items():
                if tensor == output:
                    _, other = self._residents.resolve(step.model_name, step.model_version)
                    found = other.config.labels.get(name, ())
        return found

    def _read_shared(self, call: InferCall, instance: Served, shared: SharedInputs) -> None:
        """Read a call's inputs from shared memory, large ones in a thread."""
        size = shared.copied_bytes
        call.is_volatile = shared.has_views
        call.reads_memory = True
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
        """Decode the images of a call in a thread, up to a size."""

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
        """Reserve memory for images of this size, and decode them."""
        try:
            reserve_made(call, size, "the decoded images")
        except BudgetExhausted as error:
            deliver([call], error)
            return
        self._decode(call, instance, images, size)

    def _begin_decoded(self, call: InferCall, instance: Served, images: dict[str, Tensor]) -> None:
        """Execute a call whose images were decoded in a thread."""
        call.place = None
        call.inputs = {**call.inputs, **images}
        try:
            _describe(call, instance.info)
            instance.station.begin(call)
        except ENDS:
            raise
        except BaseException as error:
            deliver([call], error)

    # --- for ensembles ---

    def resolve(self, name: str, number: str) -> Found:
        """Return the version that answers; raises ModelNotFound or ModelNotReady."""
        return self._residents.resolve(name, number)

    def begin_step(
        self, call: InferCall, version: ServedVersion, instance: Served, inputs: Tensors
    ) -> None:
        """Start a step; its inputs were validated with the plan, and it has its parameters."""
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
                call.rows = call.parent.rows  # as many as the ensemble gives elsewhere
            self._gates.admit_to_model(call)
            instance.station.begin(call)
        except BaseException as error:
            _fail(call, error)
        if not call.has_ended:
            call.count()

    def begin_passed(self, call: InferCall, version: ServedVersion, instance: Served) -> None:
        """Answer a call that another process has checked, now or later; raises nothing.

        Its inputs, rows and key are there, and when its model was found.
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

    # --- for transports, before they read tensors ---

    def require(self, name: str, version: str = "") -> AbstractContextManager[ModelInfo]:
        """Raise what `infer` would raise for a model that cannot answer.

        For a transport to call before it reads tensors: that there is no such model matters more
        than what is wrong with them. As a context it says what the model is, and counts what is
        wrong with them as a failed request of it.
        """
        require_seen_now(name, version)
        return _Reading(*self._residents.resolve(name, version))

    def info(self, name: str, version: str = "") -> ModelInfo:
        """Return the description of a model; errors as for `infer`."""
        require_seen_now(name, version)
        return self._residents.resolve(name, version)[1].info


class _Reading(AbstractContextManager[ModelInfo]):
    """While the request of a model is read."""

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
    """Fail a call with an exception; if it was answered already, report that instead."""
    if call.has_ended or isinstance(error, ENDS):
        raise error
    call.place = None
    steps = error.steps if isinstance(error, XlaserveError) else ()
    call.fail(without_hidden(call, error, steps))


def _describe(call: InferCall, info: ModelInfo) -> None:
    """Set the rows and the batching key of a call, and fill in defaults."""
    inputs = call.inputs
    call.rows = rows_of(info, inputs)
    if len(inputs) < len(info.inputs):
        rows = call.rows if info.max_batch_size else 0
        call.inputs = completed(inputs, info.inputs, info.optional, rows)
        # Who gives other inputs is in another batch, as Triton has it.
        left_out = tuple([spec.name for spec in info.inputs if spec.name not in inputs])
        call.key = (left_out, *key_of(info, call.inputs))
        if info.echoes:
            _leave_out(call, info)
    else:
        call.key = key_of(info, inputs)


def _leave_out(call: InferCall, info: ModelInfo) -> None:
    """Drop outputs of omitted inputs; raises MissingInputs if none is left."""
    wanted = call.chosen or info.outputs
    missing = [name for output in wanted if (name := info.echoes[output.name]) not in call.inputs]
    if len(missing) == len(wanted):
        count = len(info.inputs)
        raise MissingInputs(call.instance.model, count, len(call.inputs), missing, optional=count)
    call.chosen = tuple(spec for spec in wanted if info.echoes[spec.name] in call.inputs)


def rows_of(info: ModelInfo, inputs: Mapping[str, Value]) -> int:
    """Return how many rows the inputs of a request have; 1 without a batch dimension."""
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
