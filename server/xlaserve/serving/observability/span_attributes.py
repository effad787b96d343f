"""Attributes of spans: OpenTelemetry's semantic conventions, and `xlaserve.*`."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple, TypeAlias
from urllib.parse import quote

from xlaserve.serving.call import UNIX, host_of
from xlaserve.serving.observability.spans import CallSpan

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""The version of the semantic conventions that all attributes follow."""
GRPC = "grpc"
PROVIDER = "xlaserve"
CHAT, TEXT, EMBEDDINGS = "chat", "text_completion", "embeddings"
"""Values of `gen_ai.operation.name`."""
_OPERATIONS: Mapping[str, str] = {
    "/chat/completions": CHAT,
    "/responses": CHAT,
    "/completions": TEXT,
    "/embeddings": EMBEDDINGS,
}
"""Generative AI operations by the suffix of the route; other requests to generators are
text_completion.
"""

_CLIENTS_FAULTS = frozenset(
    {
        "CANCELLED",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNAUTHENTICATED",
        *map(str, range(400, 500)),
    }
)
"""gRPC and HTTP statuses that are not server errors: the conventions leave the status of such
server spans unset.
"""

Value: TypeAlias = str | int | float


class Of(Enum):
    """Kinds of spans, which determine their attributes."""

    EVERY = auto()
    """Every span of a request or step."""
    RPC = auto()
    HTTP = auto()
    ASKED = auto()
    """Client requests over gRPC or HTTP."""
    GENERATED = auto()
    """Spans of text generation and embeddings."""


class Row(NamedTuple):
    """One attribute."""

    name: str
    of: Of
    value: Callable[[CallSpan], Value | None]
    """Computes the value; None and empty strings omit the attribute."""
    since: str
    """First version of the conventions that has the name; empty for `xlaserve.*`."""


def is_rpc(call: CallSpan) -> bool:
    """Tell whether a call came over gRPC or gRPC-Web, by its method."""
    return call.method.startswith("/")


def operation(call: CallSpan) -> str:
    """Return the generative AI operation of a call, or an empty string if it is none."""
    for end, name in _OPERATIONS.items():
        if call.method.endswith(end):
            return name
    return TEXT if call.generates else ""


def name(call: CallSpan, *, is_step: bool) -> str:
    """Return the name of a call's span, with low cardinality as the conventions require."""
    if not is_step and call.method:
        return call.method.lstrip("/")
    return f"{'step' if is_step else call.operation} {call.name}".strip()


def attributes(call: CallSpan, kinds: Sequence[Of]) -> dict[str, Value]:
    """Return the attributes of a span, given its kinds."""
    found = {row.name: row.value(call) for row in ROWS if row.of in kinds}
    return {name: value for name, value in found.items() if value not in (None, "")}


def of_request(call: CallSpan) -> Sequence[Of]:
    """Return the kinds of a request's span."""
    if not call.method:
        return (Of.EVERY,)
    return (Of.EVERY, Of.ASKED, Of.RPC if is_rpc(call) else Of.HTTP)


def is_error(call: CallSpan, *, is_step: bool) -> bool:
    """Tell whether a call's span has the status ERROR."""
    if call.error is None:
        return False
    return is_step or call.status not in _CLIENTS_FAULTS


# --- values of attributes ---


def _status_code(call: CallSpan) -> int | None:
    return int(call.status) if call.status.isdecimal() else None


def _path(call: CallSpan) -> str:
    """Return the request path, with model and version filled in."""
    path = call.method.partition(" ")[2]
    for place, named in (("{model}", call.requested_model), ("{version}", call.version)):
        path = path.replace(place, quote(named, safe=""))
    return path


def _host(address: str) -> str:
    """Return an address without port and brackets, or an empty string for a unix socket."""
    return "" if address == UNIX else host_of(address).strip("[]")


def _port(address: str) -> int | None:
    host, _, port = address.rpartition(":")
    return int(port) if host and port.isdecimal() else None


def _parameter(name: str) -> Callable[[CallSpan], Value | None]:
    return lambda call: call.parameters.get(name)


ROWS: Sequence[Row] = (
    Row("xlaserve.model", Of.EVERY, lambda call: call.name, ""),
    Row("xlaserve.version", Of.EVERY, lambda call: call.version, ""),
    Row("xlaserve.request_id", Of.EVERY, lambda call: call.id, ""),
    Row("xlaserve.operation", Of.EVERY, lambda call: call.operation, ""),
    Row("xlaserve.listener", Of.EVERY, lambda call: call.peer.listener, ""),
    Row("xlaserve.batch_rows", Of.EVERY, lambda call: call.rows or None, ""),
    Row("xlaserve.error", Of.EVERY, lambda call: call.error, ""),
    Row("error.type", Of.EVERY, lambda call: (call.error or "").partition(":")[0], "1.21.0"),
    Row("rpc.system.name", Of.RPC, lambda call: GRPC, "1.39.0"),
    Row("rpc.method", Of.RPC, lambda call: call.method.lstrip("/"), "1.39.0"),
    Row("rpc.response.status_code", Of.RPC, lambda call: call.status, "1.39.0"),
    Row("http.request.method", Of.HTTP, lambda call: call.method.partition(" ")[0], "1.21.0"),
    Row("http.route", Of.HTTP, lambda call: call.method.partition(" ")[2], "1.21.0"),
    Row("http.response.status_code", Of.HTTP, _status_code, "1.21.0"),
    Row("url.path", Of.HTTP, _path, "1.21.0"),
    Row("url.scheme", Of.HTTP, lambda call: call.peer.scheme or call.scheme, "1.21.0"),
    Row("server.address", Of.ASKED, lambda call: _host(call.host), "1.21.0"),
    Row("server.port", Of.ASKED, lambda call: _port(call.host), "1.21.0"),
    Row("client.address", Of.ASKED, lambda call: _host(call.peer.address), "1.21.0"),
    Row("user_agent.original", Of.ASKED, lambda call: call.user_agent, "1.19.0"),
    Row("gen_ai.operation.name", Of.GENERATED, operation, "1.28.0"),
    Row("gen_ai.provider.name", Of.GENERATED, lambda call: PROVIDER, "1.37.0"),
    Row("gen_ai.request.model", Of.GENERATED, lambda call: call.requested_model, "1.27.0"),
    Row("gen_ai.response.model", Of.GENERATED, lambda call: call.name, "1.27.0"),
    Row("gen_ai.request.max_tokens", Of.GENERATED, _parameter("max_tokens"), "1.27.0"),
    Row("gen_ai.request.temperature", Of.GENERATED, _parameter("temperature"), "1.27.0"),
    Row("gen_ai.request.top_p", Of.GENERATED, _parameter("top_p"), "1.27.0"),
    Row("gen_ai.request.top_k", Of.GENERATED, _parameter("top_k"), "1.27.0"),
    Row("gen_ai.request.seed", Of.GENERATED, _parameter("seed"), "1.30.0"),
    Row("gen_ai.usage.input_tokens", Of.GENERATED, lambda call: call.count_tokens()[0], "1.27.0"),
    Row("gen_ai.usage.output_tokens", Of.GENERATED, lambda call: call.count_tokens()[1], "1.27.0"),
    Row("error.type", Of.GENERATED, lambda call: (call.error or "").partition(":")[0], "1.21.0"),
)
