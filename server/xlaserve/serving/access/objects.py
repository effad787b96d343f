"""The access matrix: objects, their APIs, their owners, and results for each caller."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from xlaserve.serving.call import Operation


class Access(StrEnum):
    """Result of a caller's access to an object."""

    WORKS = "works"
    ITS_OWN = "only its own"
    NOT_THERE = "not found"
    """Answered like an unknown name, before any lookup."""
    REFUSED = "refused"
    """PERMISSION_DENIED or 403."""
    UNKNOWN = "unknown"
    """UNAUTHENTICATED or 401, always with the same text."""


class Callers(NamedTuple):
    """Results of an operation on one tenant's object, for four kinds of callers."""

    nobody: Access
    """A caller without credentials."""
    owner: Access
    """The tenant: a caller limited to some models, including this one."""
    other: Access
    """A caller limited to other models."""
    operator: Access
    """A caller with every permission."""


class Rule(StrEnum):
    """Kinds of objects by ownership; `RULES` has the results for each kind of caller."""

    OF_A_MODEL = "of a model"
    LIST = "a list"
    ONLY_ONE = "the only model"
    OF_THE_SERVER = "of the whole server"
    OF_OPERATORS = "of operators"
    OF_A_CALLER = "of a caller"
    FOR_ALL = "for every caller"
    OPEN = "for everybody"


RULES: Mapping[Rule, Callers] = MappingProxyType(
    {
        Rule.OF_A_MODEL: Callers(Access.UNKNOWN, Access.WORKS, Access.NOT_THERE, Access.WORKS),
        Rule.LIST: Callers(Access.UNKNOWN, Access.ITS_OWN, Access.ITS_OWN, Access.WORKS),
        Rule.ONLY_ONE: Callers(Access.UNKNOWN, Access.ITS_OWN, Access.ITS_OWN, Access.WORKS),
        Rule.OF_THE_SERVER: Callers(Access.UNKNOWN, Access.REFUSED, Access.REFUSED, Access.WORKS),
        Rule.OF_OPERATORS: Callers(Access.UNKNOWN, Access.REFUSED, Access.REFUSED, Access.WORKS),
        # Only operators may register shared memory, so its owner is an operator.
        Rule.OF_A_CALLER: Callers(Access.UNKNOWN, Access.NOT_THERE, Access.NOT_THERE, Access.WORKS),
        Rule.FOR_ALL: Callers(Access.UNKNOWN, Access.WORKS, Access.WORKS, Access.WORKS),
        Rule.OPEN: Callers(Access.WORKS, Access.WORKS, Access.WORKS, Access.WORKS),
    }
)


@dataclass(frozen=True, slots=True)
class Doors:
    """The APIs of one operation on one kind of object."""

    thing: str
    """The object."""
    deed: str
    """The operation on the object."""
    rule: Rule
    operation: Operation
    paths: tuple[str, ...]
    """gRPC methods (`/package.Service/Method`) and HTTP routes (`GET /path`)."""


_V2 = "/inference.GRPCInferenceService/"
_MESH = "/mmesh.ModelRuntime/"
_HEALTH = "/grpc.health.v1.Health/"
_MODEL = "/v2/models/{model}"
_VERSION = "/v2/models/{model}/versions/{version}"


def _both(route: str) -> tuple[str, ...]:
    """Return a model's route without and with a version."""
    verb, _, rest = route.partition(" ")
    return f"{verb} {_MODEL}{rest}", f"{verb} {_VERSION}{rest}"


def _openai(*routes: str) -> tuple[str, ...]:
    """Return OpenAI routes, also with the prefix /openai."""
    prefixed = [route.replace(" /v1", " /openai/v1") for route in routes]
    return (*routes, *prefixed)


DOORS: tuple[Doors, ...] = (
    Doors(
        "a model",
        "infer",
        Rule.OF_A_MODEL,
        Operation.INFER,
        (
            _V2 + "ModelInfer",
            _V2 + "ModelStreamInfer",
            *_both("POST /infer"),
            *_both("POST /generate"),
            *_both("POST /generate_stream"),
            "POST /models/{model}/invoke",
            *_openai("POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses"),
            *_openai("POST /v1/embeddings"),
        ),
    ),
    Doors(
        "the default model",
        "infer",
        Rule.ONLY_ONE,
        Operation.INFER,
        ("POST /invocations",),
    ),
    Doors(
        "a model",
        "read its metadata",
        Rule.OF_A_MODEL,
        Operation.METADATA,
        (
            _V2 + "ModelMetadata",
            *_both("GET "),
            *_openai("GET /v1/models/{model}"),
            "GET /models/{model}",
        ),
    ),
    Doors(
        "a configuration",
        "read (names of hidden ensemble steps are omitted)",
        Rule.OF_A_MODEL,
        Operation.METADATA,
        (_V2 + "ModelConfig", *_both("GET /config")),
    ),
    Doors(
        "statistics",
        "read, for one model",
        Rule.OF_A_MODEL,
        Operation.METADATA,
        (_V2 + "ModelStatistics", *_both("GET /stats")),
    ),
    Doors(
        "a model",
        "ask whether it is ready",
        Rule.OF_A_MODEL,
        Operation.READINESS,
        (_V2 + "ModelReady", *_both("GET /ready")),
    ),
    Doors(
        "a model",
        "ask for its health",
        Rule.OF_A_MODEL,
        Operation.HEALTH,
        (_HEALTH + "Check", _HEALTH + "Watch"),
    ),
    Doors(
        "a model",
        "load or unload",
        Rule.OF_A_MODEL,
        Operation.MANAGE,
        (
            _V2 + "RepositoryModelLoad",
            _V2 + "RepositoryModelUnload",
            "POST /v2/repository/models/{model}/load",
            "POST /v2/repository/models/{model}/unload",
            "DELETE /models/{model}",
        ),
    ),
    Doors(
        "a model's trace settings",
        "read",
        Rule.OF_A_MODEL,
        Operation.METADATA,
        ("GET /v2/models/{model}/trace/setting",),
    ),
    Doors(
        "a model's trace settings",
        "read or change",
        Rule.OF_A_MODEL,
        Operation.MANAGE,
        (_V2 + "TraceSetting", "POST /v2/models/{model}/trace/setting"),
    ),
    Doors(
        "models",
        "list",
        Rule.LIST,
        Operation.METADATA,
        (
            _V2 + "RepositoryIndex",
            "POST /v2/repository/index",
            "GET /v2/models",
            *_openai("GET /v1/models"),
            "GET /models",
        ),
    ),
    Doors("models", "list with their health", Rule.LIST, Operation.HEALTH, (_HEALTH + "List",)),
    Doors(
        "statistics",
        "read, for all models",
        Rule.LIST,
        Operation.METADATA,
        (_V2 + "ModelStatistics", "GET /v2/models/stats"),
    ),
    Doors(
        "shared memory",
        "read its status",
        Rule.OF_A_CALLER,
        Operation.METADATA,
        (
            _V2 + "SystemSharedMemoryStatus",
            "GET /v2/systemsharedmemory/status",
            "GET /v2/systemsharedmemory/region/{region}/status",
            _V2 + "CudaSharedMemoryStatus",
            "GET /v2/cudasharedmemory/status",
            "GET /v2/cudasharedmemory/region/{region}/status",
        ),
    ),
    Doors(
        "shared memory",
        "register or unregister",
        Rule.OF_THE_SERVER,
        Operation.MANAGE,
        (
            _V2 + "SystemSharedMemoryRegister",
            _V2 + "SystemSharedMemoryUnregister",
            "POST /v2/systemsharedmemory/region/{region}/register",
            "POST /v2/systemsharedmemory/region/{region}/unregister",
            "POST /v2/systemsharedmemory/unregister",
            _V2 + "CudaSharedMemoryRegister",
            _V2 + "CudaSharedMemoryUnregister",
            "POST /v2/cudasharedmemory/region/{region}/register",
            "POST /v2/cudasharedmemory/region/{region}/unregister",
            "POST /v2/cudasharedmemory/unregister",
        ),
    ),
    Doors(
        "log settings, global trace settings",
        "read",
        Rule.FOR_ALL,
        Operation.METADATA,
        ("GET /v2/logging", "GET /v2/trace/setting"),
    ),
    Doors(
        "log settings, global trace settings",
        "change",
        Rule.OF_THE_SERVER,
        Operation.MANAGE,
        (
            _V2 + "LogSettings",
            _V2 + "TraceSetting",
            "POST /v2/logging",
            "POST /v2/trace/setting",
        ),
    ),
    Doors(
        "a model from any URL",
        "load",
        Rule.OF_THE_SERVER,
        Operation.MANAGE,
        ("POST /models",),
    ),
    Doors(
        "a named repository (not implemented)",
        "list",
        Rule.FOR_ALL,
        Operation.METADATA,
        ("POST /v2/repository/{repository}/index",),
    ),
    Doors(
        "a named repository (not implemented)",
        "load or unload",
        Rule.FOR_ALL,
        Operation.MANAGE,
        (
            "POST /v2/repository/{repository}/models/{model}/load",
            "POST /v2/repository/{repository}/models/{model}/unload",
        ),
    ),
    Doors(
        "the server",
        "read its metadata and list its services",
        Rule.FOR_ALL,
        Operation.METADATA,
        (
            _V2 + "ServerMetadata",
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            "GET /v2",
        ),
    ),
    Doors(
        "the server",
        "ask for its health",
        Rule.FOR_ALL,
        Operation.HEALTH,
        (
            _V2 + "ServerLive",
            _V2 + "ServerReady",
            _HEALTH + "Check",
            _HEALTH + "Watch",
            "GET /v2/health/live",
            "GET /v2/health/ready",
            "GET /ping",
        ),
    ),
    Doors("metrics of all models", "read", Rule.OF_OPERATORS, Operation.METRICS, ("GET /metrics",)),
    Doors(
        "the status page, its history and events",
        "read",
        Rule.OF_OPERATORS,
        Operation.PAGE,
        (
            "GET /status.json",
            "GET /history.json",
            "GET /page/events",
            "GET /page/models/{model}",
            "GET /page/hosting",
            "GET /v2/docs",
            "GET /v2/docs/openapi.json",
            "GET /v2/docs/protos.zip",
        ),
    ),
    Doors(
        "static files of the status page",
        "read",
        Rule.OPEN,
        Operation.SHELL,
        ("GET /", "GET /page/*.css", "GET /page/*.js", "GET /page/*.svg"),
    ),
    Doors(
        "models managed by a mesh",
        "load, unload, or ask for sizes",
        Rule.OF_OPERATORS,
        Operation.RUNTIME,
        (
            _MESH + "loadModel",
            _MESH + "unloadModel",
            _MESH + "predictModelSize",
            _MESH + "modelSize",
            _MESH + "runtimeStatus",
        ),
    ),
)
"""All endpoints of the server with their permissions; custom gRPC services need `service`.

An endpoint may appear several times, because the object depends on the request.
"""


class Owner(StrEnum):
    """Owner of an object that has no API."""

    CALLER = "the caller"
    MODEL = "its model"
    SERVER = "operators"


class Beside(NamedTuple):
    """An object or side effect of requests that has no API."""

    thing: str
    owner: Owner
    others: str
    """Result for another caller of the same model, or for one without access to the model."""


BESIDE: tuple[Beside, ...] = (
    Beside("cached answers", Owner.CALLER, "a cache miss: the request is executed"),
    Beside("executions shared by equal requests", Owner.CALLER, "a separate execution"),
    Beside("sequences", Owner.CALLER, "an error for that id: they must start their own sequence"),
    Beside("regions of shared memory in requests", Owner.CALLER, "an error: no such region"),
    Beside("prefix caches of generators", Owner.CALLER, "no cached tokens"),
    Beside("loads in progress", Owner.CALLER, "their own load, with their own permissions"),
    Beside(
        "steps of an ensemble, in errors, states and reasons", Owner.MODEL, "texts without names"
    ),
    Beside("models called by a model's code, in errors", Owner.MODEL, "errors without names"),
    Beside(
        "events",
        Owner.MODEL,
        "no events of hidden models, and no names or addresses of other callers",
    ),
    Beside("models, sums and failures on the page", Owner.MODEL, "nothing about hidden models"),
    Beside(
        "files named in a configuration", Owner.MODEL, "only files in the model's own directory"
    ),
    Beside(
        "traces, lines of the access log", Owner.SERVER, "nothing: no endpoint serves these files"
    ),
)
"""Objects without an API, with their owners."""
