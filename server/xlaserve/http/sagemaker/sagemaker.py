"""SageMaker's container contract: invocations of one model, or of many loaded by URL."""

import re
from base64 import b64decode, urlsafe_b64encode
from functools import partial
from http import HTTPStatus

import msgspec

from xlaserve.errors import InvalidParameter
from xlaserve.http.json.json_tensors import DEFAULT_RULES, JsonRules
from xlaserve.http.messages import (
    JSON_TYPE,
    HttpRequest,
    HttpResponse,
    Nothing,
    json_response,
)
from xlaserve.http.parsing import parsed_bytes, read_whole
from xlaserve.http.routing import Body, Header, QueryParameter, Route
from xlaserve.http.sagemaker.plain_tensors import (
    FORMS,
    NPY_TYPE,
    PLAIN_TYPES,
    most_plain_bytes,
    write_plain_response,
)
from xlaserve.http.sagemaker.sagemaker_bodies import (
    BINARY_TYPES,
    PARAMETER_HEADERS,
    SAGEMAKER_BINARY_TYPE,
    InvocationReader,
    parameters_of,
    text_of,
    v2_answer,
)
from xlaserve.http.threads import OffLoop
from xlaserve.http.v2.infer_request import BINARY_OUTPUT
from xlaserve.http.v2.infer_response import (
    HEADER_LENGTH,
    most_json_bytes,
    output_bytes,
    write_infer_response,
)
from xlaserve.residence.platforms.multi_model import MAX_PAGE, HostedModel, MultiModelContainer
from xlaserve.serving.call import Api, Operation
from xlaserve.serving.engine import Engine
from xlaserve.serving.made_arrays import made_bytes

_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)

_LENGTH = Header(HEADER_LENGTH, int, "Bytes of JSON before the binary tensors, if any.")
_INVOKE_HEADERS = (
    _LENGTH,
    *(
        Header(header, str, f"Passed to the model as parameter `{name}`.")
        for header, name in PARAMETER_HEADERS.items()
    ),
)
_EXAMPLE = {"instances": [list(range(16))]}
"""Matches the example model `identity`."""
_LOAD_EXAMPLE = {"model_name": "one", "url": "/opt/ml/models/one/model"}

_SHOWN = 80
_TAG = "SageMaker"
_PROTOCOL = "SageMaker"


class LoadRequest(msgspec.Struct):
    """A model to load, and its arbitrary name."""

    model_name: str
    url: str


class Model(msgspec.Struct, rename="camel"):
    """One loaded model."""

    model_name: str
    model_url: str


class ModelList(msgspec.Struct, rename="camel", omit_defaults=True):
    """A page of the loaded models, ordered by name."""

    models: list[Model]
    next_page_token: str = ""
    """Token of the next page; empty on the last page."""


class Health(msgspec.Struct):
    """Whether the container can take requests."""

    status: str


def sagemaker_routes(
    container: MultiModelContainer,
    engine: Engine,
    threads: OffLoop,
    *,
    max_json_depth: int,
    default_accept: str = JSON_TYPE,
    json_rules: JsonRules = DEFAULT_RULES,
) -> list[Route]:
    """Return the routes (SageMaker, Container Contract for Multi-Model Endpoints)."""
    handlers = SageMakerRoutes(
        container,
        engine,
        threads,
        max_json_depth=max_json_depth,
        default_accept=default_accept,
        json_rules=json_rules,
    )
    return [*handlers.model_rows(), *handlers.invocation_rows()]


class SageMakerRoutes:
    """The handlers of the contract, without any decisions of their own."""

    def __init__(
        self,
        container: MultiModelContainer,
        engine: Engine,
        threads: OffLoop,
        *,
        max_json_depth: int,
        default_accept: str,
        json_rules: JsonRules,
    ) -> None:
        self._json_rules = json_rules
        self._threads = threads
        self._container = container
        self._engine = engine
        self._max_json_depth = max_json_depth
        self._reader = InvocationReader(max_json_depth, default_accept)

    def model_rows(self) -> list[Route]:
        """Return the routes that load, list and unload models."""
        return [
            Route(
                "POST",
                "/models",
                Operation.MANAGE,
                self.load,
                "Load a model from a URL",
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
                api=Api.MODEL_REPOSITORY,
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
                api=Api.MODEL_REPOSITORY,
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
        """Return the routes for invocations and health."""
        takes = (*PLAIN_TYPES, *BINARY_TYPES)
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

    # --- Models ---

    async def load(self, request: HttpRequest) -> HttpResponse:
        """Load a model and answer once it is ready (Load Model API)."""
        request.call.protocol = _PROTOCOL
        depth = self._max_json_depth
        body: LoadRequest = await read_whole(self._threads, request, LoadRequest, max_depth=depth)
        await self._container.load(body.model_name, body.url)
        return json_response(Nothing())

    async def list(self, request: HttpRequest) -> HttpResponse:
        """List a page of the loaded models (List Model API)."""
        page = self._container.page(
            _limit(request.query.get("limit", "")),
            _name_of(request.query.get("next_page_token", "")),
        )
        return json_response(ModelList([_model(m) for m in page.models], _token_of(page.last)))

    async def get(self, request: HttpRequest) -> HttpResponse:
        """Show the name and URL of a loaded model (Get Model API)."""
        return json_response(_model(self._container.get(request.names["model"])))

    async def unload(self, request: HttpRequest) -> HttpResponse:
        """Unload a model and answer once its memory is free (Unload Model API)."""
        request.call.protocol = _PROTOCOL
        await self._container.unload(request.names["model"])
        return json_response(Nothing())

    # --- Invocations ---

    async def ping(self, request: HttpRequest) -> HttpResponse:
        """Tell whether the container is healthy, which it is even without models."""
        if self._container.healthy:
            return json_response(Health("Healthy"))
        return json_response(Health("Unhealthy"), HTTPStatus.SERVICE_UNAVAILABLE)

    async def invoke(self, request: HttpRequest) -> HttpResponse:
        """Run one inference on the model named in the path (Invoke Model API)."""
        return await self._invoke(request.names["model"], request)

    async def invoke_default(self, request: HttpRequest) -> HttpResponse:
        """Run one inference on the default model, or on the only model."""
        return await self._invoke(self._container.default(), request)

    async def _invoke(self, model: str, request: HttpRequest) -> HttpResponse:
        with self._engine.require(model) as info:
            parameters = parameters_of(model, request)
            body = await request.read()
            text = text_of(request, body)
            request.grow(await parsed_bytes(self._threads, info, text), "the parsed body")
            read = partial(self._reader.read, info, model, request, body)
            invocation = await self._threads.run(len(body), read)
            if len(text) < len(body):
                # The binary part was not charged in advance.
                request.grow(made_bytes(invocation.inference.inputs), "the tensors")
        if invocation.form in BINARY_TYPES:
            parameters[BINARY_OUTPUT] = True
        inference = msgspec.structs.replace(
            invocation.inference, parameters={**invocation.inference.parameters, **parameters}
        )
        response = await self._engine.infer(inference)
        size, account = output_bytes(response), request.call.peer.account
        if invocation.form in BINARY_TYPES or (invocation.is_v2 and invocation.form == JSON_TYPE):
            write = partial(write_infer_response, inference, response, self._json_rules)
            made = most_json_bytes(response, inference, self._json_rules)
            return v2_answer(await self._threads.write(size, write, account, made))
        plain = partial(write_plain_response, info, response, invocation.form, self._json_rules)
        made = 0 if invocation.form == NPY_TYPE else most_plain_bytes(response, self._json_rules)
        return await self._threads.write(size, plain, account, made)


def _limit(text: str) -> int:
    if not text:
        return MAX_PAGE
    if not _DIGITS.fullmatch(text.removeprefix("-")):
        raise InvalidParameter("limit", "an integer", repr(text[:_SHOWN]))
    return int(text)


def _token_of(name: str) -> str:
    return urlsafe_b64encode(name.encode()).decode()


def _name_of(token: str) -> str:
    """Return the model name in a page token; raises InvalidParameter for an invalid token."""
    try:
        return b64decode(token, altchars=b"-_", validate=True).decode()
    except ValueError:
        raise InvalidParameter(
            "next_page_token", "the nextPageToken of a page", repr(token[:_SHOWN])
        ) from None


def _model(model: HostedModel) -> Model:
    return Model(model.name, model.url)
