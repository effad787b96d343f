"""The container contract of SageMaker: many models by url, or one, and invocations of both."""

import re
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from types import MappingProxyType

import msgspec
import structlog

from xlaserve.core.residence.multi_model import MAX_PAGE, HostedModel, MultiModelContainer
from xlaserve.core.serving.call import Operation
from xlaserve.core.serving.engine import Engine
from xlaserve.core.serving.inference import InferRequest, Parameter
from xlaserve.errors import InvalidBody, InvalidParameter
from xlaserve.models.loaded import ModelInfo
from xlaserve.tensors import TensorSpec
from xlaserve.transport.rest.infer_request import (
    BINARY_OUTPUT,
    read_header_length,
    read_infer_request,
)
from xlaserve.transport.rest.infer_response import InferBody, write_infer_response
from xlaserve.transport.rest.json_text import check_depth
from xlaserve.transport.rest.messages import (
    BINARY_TYPE,
    JSON_TYPE,
    HttpRequest,
    HttpResponse,
    Nothing,
    json_response,
    read_json,
)
from xlaserve.transport.rest.parsing import parsed_bytes
from xlaserve.transport.rest.plain_tensors import (
    FORMS,
    JSONLINES_TYPE,
    PLAIN_TYPES,
    choose_form,
    is_object,
    read_plain_request,
    write_plain_response,
)
from xlaserve.transport.rest.routing import Body, Header, QueryParameter, Route
from xlaserve.transport.rest.threads import OffLoop

SAGEMAKER_BINARY_TYPE = "application/vnd.sagemaker-triton.binary+json"
"""V2 with binary tensors, for where headers do not pass: the length of its JSON is a parameter."""

HEADER_LENGTH = "Inference-Header-Content-Length"

_BINARY_TYPES = (SAGEMAKER_BINARY_TYPE, BINARY_TYPE)
_TEXT_TYPES = ("", JSON_TYPE, "text/csv", JSONLINES_TYPE)
_JSON_HEADER_SIZE = re.compile(r";\s*json-header-size\s*=\s*([^;]*)", re.IGNORECASE)
_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)

PARAMETER_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "X-Amzn-SageMaker-Target-Model": "sagemaker_target_model",
        "X-Amzn-SageMaker-Custom-Attributes": "sagemaker_custom_attributes",
    }
)
"""Headers that a model is given as parameters of the request."""
_MAX_PARAMETER_CHARACTERS = 1024
"""As long as SageMaker lets the attributes be."""

_LENGTH = Header(HEADER_LENGTH, int, "Bytes of JSON in front of binary tensors, where some follow.")
_INVOKE_HEADERS = (
    _LENGTH,
    *(
        Header(header, str, f"The model is given it as parameter `{name}`.")
        for header, name in PARAMETER_HEADERS.items()
    ),
)
_EXAMPLE = {"instances": [list(range(16))]}
"""For the model `identity` of the examples."""
_LOAD_EXAMPLE = {"model_name": "one", "url": "/opt/ml/models/one/model"}

_SHOWN = 80
_TAG = "sagemaker"

_log = structlog.get_logger("sagemaker")


class LoadRequest(msgspec.Struct):
    """A model to load, and the name that it gets; nothing follows from the name."""

    model_name: str
    url: str


class Model(msgspec.Struct, rename="camel"):
    """One model that is loaded."""

    model_name: str
    model_url: str


class ModelList(msgspec.Struct, rename="camel", omit_defaults=True):
    """One page of the models that are loaded, by name."""

    models: list[Model]
    next_page_token: str = ""
    """There where another page follows."""


class Health(msgspec.Struct):
    """Whether the container can take requests."""

    status: str


class _Kind(msgspec.Struct):
    """What tells a V2 request from bare tensors."""

    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    instances: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_KIND = msgspec.json.Decoder(_Kind)


def sagemaker_routes(
    container: MultiModelContainer,
    engine: Engine,
    threads: OffLoop,
    *,
    max_json_depth: int,
    default_accept: str = JSON_TYPE,
    strict_json: bool = False,
) -> list[Route]:
    """Return the rows of the contract (SageMaker, Container Contract for Multi-Model Endpoints)."""
    handlers = SageMakerRoutes(
        container,
        engine,
        threads,
        max_json_depth=max_json_depth,
        default_accept=default_accept,
        strict_json=strict_json,
    )
    return [*handlers.model_rows(), *handlers.invocation_rows()]


class SageMakerRoutes:
    """The handlers of the contract; each decides nothing."""

    def __init__(
        self,
        container: MultiModelContainer,
        engine: Engine,
        threads: OffLoop,
        *,
        max_json_depth: int,
        default_accept: str,
        strict_json: bool,
    ) -> None:
        self._strict_json = strict_json
        self._threads = threads
        self._container = container
        self._engine = engine
        self._max_json_depth = max_json_depth
        self._default_accept = default_accept

    def model_rows(self) -> list[Route]:
        """Return the rows that load, list and unload."""
        return [
            Route(
                "POST",
                "/models",
                Operation.MANAGE,
                self.load,
                "Load a model from a url",
                _TAG,
                Body(Nothing),
                takes=Body(LoadRequest, example=_LOAD_EXAMPLE),
                errors=(400, 403, 408, 409, 413, 501, 503, 507),
            ),
            Route(
                "GET",
                "/models",
                Operation.METADATA,
                self.list,
                "List the loaded models",
                _TAG,
                Body(ModelList),
                query=(
                    QueryParameter("limit", int, f"Models on a page, at most {MAX_PAGE}."),
                    QueryParameter("next_page_token", str, "The nextPageToken of a page."),
                ),
                errors=(400,),
            ),
            Route(
                "GET",
                "/models/{model}",
                Operation.METADATA,
                self.get,
                "Show a loaded model",
                _TAG,
                Body(Model),
                errors=(404,),
            ),
            Route(
                "DELETE",
                "/models/{model}",
                Operation.MANAGE,
                self.unload,
                "Unload a model",
                _TAG,
                Body(Nothing),
                errors=(403, 404, 503),
            ),
        ]

    def invocation_rows(self) -> list[Route]:
        """Return the rows that infer, and the one that tells whether that would work."""
        takes = (*PLAIN_TYPES, *_BINARY_TYPES)
        answer = (*(form.media_type for form in FORMS), SAGEMAKER_BINARY_TYPE)
        rows = (
            ("/models/{model}/invoke", self.invoke, "Invoke a loaded model"),
            ("/invocations", self.invoke_default, "Invoke the only model, or the default one"),
        )
        return [
            Route(
                "GET",
                "/ping",
                Operation.HEALTH,
                self.ping,
                "Health",
                _TAG,
                Body(Health),
                other={503: "Not ready."},
            ),
            *(
                Route(
                    "POST",
                    path,
                    Operation.INFER,
                    handle,
                    summary,
                    _TAG,
                    Body(media_types=answer, headers=(_LENGTH,)),
                    takes=Body(media_types=takes, headers=_INVOKE_HEADERS, example=_EXAMPLE),
                    errors=(400, 403, 404, 406, 408, 413, 415, 501, 503, 507),
                )
                for path, handle, summary in rows
            ),
        ]

    # --- models ---

    async def load(self, request: HttpRequest) -> HttpResponse:
        """Load a model and answer once it is ready (Load Model API)."""
        asked: LoadRequest = read_json(
            await request.read(), LoadRequest, max_depth=self._max_json_depth
        )
        await self._container.load(asked.model_name, asked.url)
        return json_response(Nothing())

    async def list(self, request: HttpRequest) -> HttpResponse:
        """List a page of the loaded models (List Model API)."""
        page = self._container.page(
            _limit(request.query.get("limit", "")),
            _name_of(request.query.get("next_page_token", "")),
        )
        return json_response(ModelList([_model(m) for m in page.models], _token_of(page.last)))

    async def get(self, request: HttpRequest) -> HttpResponse:
        """Show name and url of a loaded model (Get Model API)."""
        return json_response(_model(self._container.get(request.names["model"])))

    async def unload(self, request: HttpRequest) -> HttpResponse:
        """Unload a model and answer once its memory is free (Unload Model API)."""
        await self._container.unload(request.names["model"])
        return json_response(Nothing())

    # --- invocations ---

    async def ping(self, request: HttpRequest) -> HttpResponse:
        """Tell whether the container is healthy; one that waits for models is."""
        if self._container.healthy:
            return json_response(Health("Healthy"))
        return json_response(Health("Unhealthy"), HTTPStatus.SERVICE_UNAVAILABLE)

    async def invoke(self, request: HttpRequest) -> HttpResponse:
        """Run one inference on the model that the path names (Invoke Model API)."""
        return await self._invoke(request.names["model"], request)

    async def invoke_default(self, request: HttpRequest) -> HttpResponse:
        """Run one inference on the default model, or on the only one."""
        return await self._invoke(self._container.default(), request)

    async def _invoke(self, model: str, request: HttpRequest) -> HttpResponse:
        with self._engine.require(model):
            parameters = _parameters(model, request)
            body = await request.read()
            info = self._engine.info(model)
            text = _text_of(request, body)
            request.grow(await parsed_bytes(self._threads, info, text), "the parsed body")
            read = partial(self._read, info, model, request, body)
            asked = await self._threads.run(len(body), read)
        if asked.form in _BINARY_TYPES:
            parameters[BINARY_OUTPUT] = True
        inference = msgspec.structs.replace(
            asked.inference, parameters={**asked.inference.parameters, **parameters}
        )
        response = await self._engine.infer(inference)
        size = sum(output.data.nbytes for output in response.outputs)
        if asked.form in _BINARY_TYPES or (asked.is_v2 and asked.form == JSON_TYPE):
            write = partial(write_infer_response, inference, response, strict=self._strict_json)
            return _v2_answer(await self._threads.run(size, write))
        return await self._threads.run(
            size,
            partial(write_plain_response, info, response, asked.form, strict=self._strict_json),
        )

    def _read(
        self, info: ModelInfo, model: str, request: HttpRequest, body: memoryview
    ) -> "_Asked":
        is_v2 = self._is_v2(request, body)
        if is_v2:
            length = _json_length(request)
            inference = read_infer_request(
                info, model, "", body, length, max_depth=self._max_json_depth
            )
        else:
            media_type = request.content_type or JSON_TYPE
            if media_type == JSONLINES_TYPE:
                check_depth(body, self._max_json_depth)
            inference = read_plain_request(info, model, media_type, body)
        form = choose_form(
            _wanted(info, inference),
            request.headers.get("Accept", ""),
            default=JSON_TYPE if is_v2 else self._default_accept,
            others=_BINARY_TYPES,
        )
        return _Asked(inference, form, is_v2=is_v2)

    def _is_v2(self, request: HttpRequest, body: memoryview) -> bool:
        """Tell a V2 request from a body that is bare tensors; raises InvalidBody."""
        if request.content_type in _BINARY_TYPES:
            return True
        if request.content_type not in ("", JSON_TYPE):
            return False
        if HEADER_LENGTH in request.headers:
            return True
        check_depth(body, self._max_json_depth)
        if not is_object(body):
            return False
        try:
            kind = _KIND.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return True  # its reader says best what is wrong
        return kind.instances is msgspec.UNSET or kind.inputs is not msgspec.UNSET


@dataclass(frozen=True, slots=True)
class _Asked:
    """An invocation as it was read, and the media type that its answer is to have."""

    inference: InferRequest
    form: str
    is_v2: bool


def _v2_answer(body: InferBody) -> HttpResponse:
    """Send an answer; the length of its JSON stands where it survives, and where others look."""
    if body.header_length is None:
        return HttpResponse(parts=body.parts)
    return HttpResponse(
        content_type=f"{SAGEMAKER_BINARY_TYPE};json-header-size={body.header_length}",
        parts=body.parts,
        headers={HEADER_LENGTH: str(body.header_length)},
        compressible=False,
    )


def _text_of(request: HttpRequest, body: memoryview) -> memoryview:
    """Return the part of a body that is text, to be parsed."""
    if request.content_type in _BINARY_TYPES or HEADER_LENGTH in request.headers:
        return body[: _json_length(request)]
    return body if request.content_type in _TEXT_TYPES else body[:0]


def _json_length(request: HttpRequest) -> int | None:
    """Return how much of a V2 body is JSON; None for all of it.

    Binary data that says nothing of JSON has none.
    """
    length = read_header_length(request.headers.get(HEADER_LENGTH))
    if request.content_type != SAGEMAKER_BINARY_TYPE:
        return 0 if length is None and request.content_type == BINARY_TYPE else length
    found = _JSON_HEADER_SIZE.search(request.headers["Content-Type"])
    text = found[1].strip().strip('"') if found else ""
    if not _DIGITS.fullmatch(text):
        raise InvalidBody(
            f"expected json-header-size in digits as a parameter of the Content-Type, got "
            f"{text[:_SHOWN]!r}"
        )
    return int(text)


def _wanted(info: ModelInfo, inference: InferRequest) -> Sequence[TensorSpec]:
    names = {output.name for output in inference.outputs}
    return [spec for spec in info.outputs if spec.name in names] or info.outputs


def _parameters(model: str, request: HttpRequest) -> dict[str, Parameter]:
    """Return what the platform says of a request, for the model; and log it."""
    found = {
        name: request.headers[header][:_MAX_PARAMETER_CHARACTERS]
        for header, name in PARAMETER_HEADERS.items()
        if header in request.headers
    }
    # What came as broken UTF-8 is shown as it came, escaped.
    found = {name: text.encode(errors="backslashreplace").decode() for name, text in found.items()}
    if found:
        _log.info("invoked", model=model, **found)
    return dict(found)


def _limit(text: str) -> int:
    if not text:
        return MAX_PAGE
    if not _DIGITS.fullmatch(text.removeprefix("-")):
        raise InvalidParameter("limit", "an integer", repr(text[:_SHOWN]))
    return int(text)


def _token_of(name: str) -> str:
    return urlsafe_b64encode(name.encode()).decode()


def _name_of(token: str) -> str:
    """Return the name that a token stands for; raises InvalidParameter for one of nobody's."""
    try:
        return b64decode(token, altchars=b"-_", validate=True).decode()
    except ValueError:
        raise InvalidParameter(
            "next_page_token", "the nextPageToken of a page", repr(token[:_SHOWN])
        ) from None


def _model(model: HostedModel) -> Model:
    return Model(model.name, model.url)
