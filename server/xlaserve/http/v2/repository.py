"""The model repository extension over HTTP: index, load, unload."""

import base64
import binascii
from typing import Any

import msgspec

from xlaserve.errors import InvalidParameter, Unsupported
from xlaserve.http.messages import HttpRequest, HttpResponse, Nothing, json_response
from xlaserve.http.parsing import read_whole
from xlaserve.http.routing import Body, Route
from xlaserve.http.threads import OffLoop
from xlaserve.residence.control import ModelControl
from xlaserve.residence.repository.overrides import CONFIG, FILE_PREFIX, LoadParameter
from xlaserve.serving.call import Api, Operation

_TAG = "repository"
_SHOWN = 80
_PIECE = 1 << 20
"""Number of base64 characters decoded at a time; four characters give three bytes."""


class IndexRequest(msgspec.Struct):
    """The filter of a repository index."""

    ready: bool = False
    """Whether to list only ready versions."""


class IndexRow(msgspec.Struct, omit_defaults=True):
    """A known version, or an unloaded model in the repository."""

    name: str
    state: str
    reason: str
    version: str = ""


class ControlRequest(msgspec.Struct):
    """A load or unload request; the model repository extension defines its parameters."""

    parameters: dict[str, Any] = {}


class RepositoryRoutes:
    """The handlers of the model repository extension."""

    def __init__(self, control: ModelControl, threads: OffLoop, *, max_json_depth: int) -> None:
        self._control = control
        self._threads = threads
        self._max_json_depth = max_json_depth

    def table(self) -> list[Route]:
        """Return the routes of these handlers, with and without a repository name."""
        rows = []
        for repository in ("/v2/repository", "/v2/repository/{repository}"):
            rows.append(
                Route(
                    "POST",
                    f"{repository}/index",
                    Operation.METADATA,
                    self.index,
                    "Repository index",
                    _TAG,
                    Body(list[IndexRow]),
                    takes=Body(IndexRequest, required=False, example={"ready": True}),
                    errors=(400, 403, 408, 413, 501),
                    api=Api.MODEL_REPOSITORY,
                )
            )
            rows += [
                Route(
                    "POST",
                    f"{repository}/models/{{model}}/{verb.__name__}",
                    Operation.MANAGE,
                    verb,
                    summary,
                    _TAG,
                    Body(Nothing),
                    takes=Body(ControlRequest, required=False, example={"parameters": {}}),
                    errors=errors,
                )
                for verb, summary, errors in (
                    (self.load, "Load or reload a model", _LOAD_ERRORS),
                    (self.unload, "Unload a model", _UNLOAD_ERRORS),
                )
            ]
        return rows

    async def index(self, request: HttpRequest) -> HttpResponse:
        """List loaded and loadable models."""
        _refuse_repository(request)
        body: IndexRequest = await read_whole(
            self._threads, request, IndexRequest, max_depth=self._max_json_depth
        )
        rows = await self._control.of_all.index(ready=body.ready)
        return json_response(
            [IndexRow(row.name, row.state, row.reason, version=row.version) for row in rows]
        )

    async def load(self, request: HttpRequest) -> HttpResponse:
        """Load or reload a model, and answer once it is ready."""
        _refuse_repository(request)
        await self._control.load(request.names["model"], await self._parameters(request))
        return json_response(Nothing())

    async def unload(self, request: HttpRequest) -> HttpResponse:
        """Unload a model, and answer once its memory is free."""
        _refuse_repository(request)
        await self._control.unload(request.names["model"], await self._parameters(request))
        return json_response(Nothing())

    async def _parameters(self, request: HttpRequest) -> dict[str, LoadParameter]:
        found: dict[str, LoadParameter] = await read_whole(
            self._threads, request, ControlRequest, _parameters, max_depth=self._max_json_depth
        )
        return found


_UNLOAD_ERRORS = (400, 403, 404, 408, 413, 501, 503)
_LOAD_ERRORS = (*_UNLOAD_ERRORS, 507)


def _refuse_repository(request: HttpRequest) -> None:
    if "repository" in request.names:
        raise Unsupported("choosing a repository by name")


def _parameters(body: ControlRequest) -> dict[str, LoadParameter]:
    return {name: _parameter(name, value) for name, value in body.parameters.items()}


def _parameter(name: str, value: Any) -> LoadParameter:
    if name == CONFIG and isinstance(value, dict):
        return msgspec.json.encode(value).decode()  # accept an object too, as written in examples
    if name.startswith(FILE_PREFIX) and isinstance(value, str):
        return _decoded(name, value)
    if isinstance(value, bool | int | str):
        return value
    raise InvalidParameter(name[:_SHOWN], "a string, a number or a boolean", _kind(value))


def _decoded(name: str, text: str) -> bytes:
    if text.find("=", 0, -2) >= 0:
        raise InvalidParameter(name[:_SHOWN], "base64", "characters after the padding")
    try:
        # In pieces: decoding everything in one call would hold the GIL too long.
        pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
        return b"".join(base64.b64decode(piece, validate=True) for piece in pieces)
    except (binascii.Error, ValueError) as error:
        raise InvalidParameter(name[:_SHOWN], "base64", str(error)) from None


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "an array", float: "a fraction", type(None): "null"}
    return kinds[type(value)]
