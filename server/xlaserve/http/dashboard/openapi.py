"""The OpenAPI 3.1 description of the gateway, generated from its route table."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import msgspec

from xlaserve.errors import XlaserveError
from xlaserve.http.events import EVENT_STREAM_TYPE
from xlaserve.http.messages import JSON_TYPE
from xlaserve.http.routing import Body, Header, Route
from xlaserve.net.status import STATUSES
from xlaserve.residence.server import NAME

Object: TypeAlias = dict[str, Any]
"""A JSON object."""

SAFE_METHODS = frozenset({"GET", "HEAD"})

TAGS: Mapping[str, str] = MappingProxyType(
    {
        "server": "Health, name and version of the server.",
        "inference": "The V2 (Open Inference) protocol: model metadata and inference.",
        "OpenAI": "OpenAI's endpoints, for language models.",
        "repository": "The model repository extension: index, load and unload.",
        "shared memory": "Tensors in shared memory, for clients on this machine.",
        "SageMaker": "The container contract of SageMaker, for one model or many.",
        "people": "Pages for people and metrics for monitoring.",
        "settings": "Log and trace settings, changeable at run time.",
    }
)
"""The groups of routes, in the order of the documentation."""

_ABOVE = "../.."
"""Relative base URL of the routes, since a proxy may serve them below a path."""
_SCHEMAS = "#/components/schemas/"
_ERROR = {"$ref": "#/components/responses/Error"}
_NAME = re.compile(r"\{(\w+)\}")

_PATH_PARAMETERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "model": ("Name of a model, percent-encoded: `a/b c` is `a%2Fb%20c`.", "identity"),
        "version": ("Number of a version.", "1"),
        "region": ("Name of a region of shared memory.", "input"),
        "repository": ("Name of a repository; only the unnamed repository exists.", "main"),
    }
)
"""Meaning and example of each path parameter."""


class Error(msgspec.Struct):
    """The body of an error."""

    error: Annotated[str, msgspec.Meta(description="The error message.")]


def describe(routes: Iterable[Route], *, version: str) -> Object:
    """Return the description of a route table."""
    rows = tuple(routes)
    schemas, components = _schemas(rows)
    paths: dict[str, Object] = {}
    for row in rows:
        paths.setdefault(row.path, {})[row.method.lower()] = _operation(row, schemas)
    tags = [name for name in TAGS if any(row.tag == name for row in rows)]
    return {
        "openapi": "3.1.0",
        "jsonSchemaDialect": "https://json-schema.org/draft/2020-12/schema",
        "info": {
            "title": NAME,
            "version": version,
            "summary": "A server for JAX models.",
            "description": _FAILURES + (_AS_OPENAI if "OpenAI" in tags else "") + _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": _ABOVE}],
        "tags": [{"name": name, "description": TAGS[name]} for name in tags],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {
                "Error": _error(schemas[Error]),
            },
        },
    }


_FAILURES = 'Every failure is answered `{"error": text}`'
_AS_OPENAI = ", and below `/v1` and `/openai/v1` as OpenAI does"
_ABOUT = """.
Besides what is listed with each operation:
a path that is not here is 404, a method that a path does not have is 405 with `Allow`;
a request that cannot be read at all is 400; while too many connections are open
(`max_http_connections`) the answer is 503; who has no permission, or asks too much, is answered
401, 403 or 429; and a host that the server is not, 421. `HEAD` is answered as `GET` is, without
the body. A slash at the end of a path makes no difference. Bodies may be compressed with gzip or
deflate (`Content-Encoding`), and answers of models, pages and
metrics are where `Accept-Encoding` allows it."""


def errors_by_status() -> dict[int, list[str]]:
    """Return the errors by status, from the status table."""
    found: dict[int, list[str]] = {}
    for kind, status in STATUSES.items():
        found.setdefault(int(status.http), []).append(_first_line(kind))
    return dict(sorted(found.items()))


def statuses(route: Route) -> list[int]:
    """Return the statuses with which a route can answer `{"error": text}`."""
    of_server = {500} if route.method in SAFE_METHODS else {403, 500}
    return sorted(of_server.union(route.errors))


# --- Schemas ---


def _schemas(rows: Sequence[Route]) -> tuple[Mapping[object, Object], Object]:
    bodies = [body for row in rows for body in (row.takes, row.answer) if body is not None]
    named = [*(body.schema for body in bodies), *(row.error for row in rows)]
    kinds = [Error, *dict.fromkeys(kind for kind in named if kind is not None)]
    made, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS + "{name}")
    # Python tuples in defaults become arrays.
    plain = msgspec.json.decode(msgspec.json.encode(components), type=Object)
    return dict(zip(kinds, made, strict=True)), plain


def _content(body: Body, schemas: Mapping[object, Object]) -> Object:
    return {media_type: _media(body, media_type, schemas) for media_type in body.media_types}


def _media(body: Body, media_type: str, schemas: Mapping[object, Object]) -> Object:
    if media_type == EVENT_STREAM_TYPE:
        return {}  # readers disagree on whether the schema describes one event or all
    if media_type.startswith("text/"):
        return {"schema": {"type": "string"}}
    if media_type != JSON_TYPE:
        return {}  # Bytes have an empty media type object (OpenAPI 3.1, Media Type Object).
    media: Object = {"schema": {} if body.schema is None else schemas[body.schema]}
    return media if body.example is None else media | {"example": body.example}


# --- Operations ---


def _operation(row: Route, schemas: Mapping[object, Object]) -> Object:
    operation: Object = {
        "operationId": operation_id(row),
        "tags": [row.tag],
        "summary": row.summary,
        "description": inspect.getdoc(row.handle) or row.summary,
        "parameters": _parameters(row),
        "responses": _responses(row, schemas),
    }
    if row.takes is not None:
        operation["requestBody"] = {
            "required": row.takes.required,
            "content": _content(row.takes, schemas),
        }
    return operation


def operation_id(row: Route) -> str:
    """Return a unique name that is a valid identifier."""
    path = re.sub(r"\W+", "_", _NAME.sub(r"by_\1", row.path)).strip("_")
    return f"{row.method.lower()}_{path or 'root'}"


def _parameters(row: Route) -> list[Object]:
    found = [_path_parameter(name) for name in _NAME.findall(row.path)]
    found += [
        _parameter("query", query.name, query.kind, query.text, required=False)
        for query in row.query
    ]
    headers = row.takes.headers if row.takes else ()
    found += [
        _parameter("header", header.name, header.kind, header.text, required=header.required)
        for header in headers
    ]
    return found


def _path_parameter(name: str) -> Object:
    text, example = _PATH_PARAMETERS[name]
    parameter = _parameter("path", name, str, text, required=True)
    parameter["schema"]["minLength"] = 1
    return parameter | {"example": example}


def _parameter(where: str, name: str, kind: type, text: str, *, required: bool) -> Object:
    return {
        "name": name,
        "in": where,
        "required": required,
        "description": text,
        "schema": _kind(kind),
    }


def _kind(kind: type) -> Object:
    return dict(msgspec.json.schema(kind))


def _responses(row: Route, schemas: Mapping[object, Object]) -> Object:
    answers = {int(HTTPStatus.OK): "The answer."} | dict(row.other)
    errors = statuses(row)
    error = _ERROR if row.error is None else _error(schemas[row.error])
    responses: Object = {}
    for status in sorted({*answers, *errors}):
        if status not in answers:
            responses[str(status)] = error
            continue
        response: Object = {
            "description": answers[status],
            "content": _content(row.answer, schemas),
        }
        if row.answer.headers:
            response["headers"] = {header.name: _header(header) for header in row.answer.headers}
        responses[str(status)] = _or_error(response, schemas) if status in errors else response
    return responses


def _error(schema: Object) -> Object:
    return {"description": "What went wrong.", "content": {JSON_TYPE: {"schema": schema}}}


def _or_error(response: Object, schemas: Mapping[object, Object]) -> Object:
    """Describe a status whose body is either the response or an error."""
    media = response["content"].get(JSON_TYPE, {"schema": schemas[Error]})
    either = {"schema": {"anyOf": [media["schema"], schemas[Error]]}}
    return response | {"content": response["content"] | {JSON_TYPE: either}}


def _header(header: Header) -> Object:
    return {
        "description": header.text,
        "required": header.required,
        "schema": _kind(header.kind),
    }


def _first_line(kind: type[XlaserveError]) -> str:
    return (inspect.getdoc(kind) or kind.__name__).splitlines()[0]
