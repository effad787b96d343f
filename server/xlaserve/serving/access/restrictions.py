"""Restricted APIs: groups of requests that require a secret header, as in Triton."""

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from xlaserve.errors import InvalidSettings
from xlaserve.errors.access import Restricted
from xlaserve.serving.call import Api, Call, Operation

_GRPC_PREFIX = "triton-grpc-protocol-"
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")

_OF_OPERATION: Mapping[Operation, Api] = MappingProxyType(
    {
        Operation.INFER: Api.INFERENCE,
        Operation.SERVICE: Api.INFERENCE,
        Operation.METADATA: Api.METADATA,
        Operation.PAGE: Api.METADATA,
        Operation.HEALTH: Api.HEALTH,
        Operation.READINESS: Api.HEALTH,
        Operation.MANAGE: Api.MODEL_REPOSITORY,
        Operation.RUNTIME: Api.MODEL_REPOSITORY,
    }
)
"""Groups of operations without an explicit one. SageMaker, the status page, ModelMesh and custom
services are in the group with the same effect, so that they cannot bypass a restriction. Metrics
are in none.
"""


@dataclass(frozen=True, slots=True)
class _Key:
    header: str
    value: bytes
    kind: str


class Restrictions:
    """The required headers by group, for gRPC and HTTP."""

    def __init__(self, grpc: Mapping[Api, _Key], http: Mapping[Api, _Key]) -> None:
        self._of_listener = {
            "grpc_endpoint": grpc,
            "grpc_data_endpoint": grpc,
            "http_endpoint": http,
            "metrics_endpoint": http,
        }

    @classmethod
    def of(cls, grpc: Iterable[str], http: Iterable[str]) -> "Restrictions | None":
        """Parse the values of both settings; return None if nothing is restricted.

        Raises InvalidSettings for values other than `groups:key=value`, and for repeated groups.
        """
        of_grpc = _read("grpc_restricted_protocol", grpc, _GRPC_PREFIX, "protocol")
        of_http = _read("http_restricted_api", http, "", "API")
        return cls(of_grpc, of_http) if of_grpc or of_http else None

    def check(self, call: Call) -> None:
        """Raise Restricted if a call lacks the header that its group requires."""
        keys = self._of_listener.get(call.peer.listener)
        if not keys:
            return
        api = call.api or _OF_OPERATION.get(call.operation)
        key = None if api is None else keys.get(api)
        if key is None:
            return
        got = call.headers.get(key.header) or ""
        if not hmac.compare_digest(got.encode(errors="surrogateescape"), key.value):
            raise Restricted(key.kind, key.header)


def _read(setting: str, texts: Iterable[str], prefix: str, kind: str) -> dict[Api, _Key]:
    found: dict[Api, _Key] = {}
    waiting: list[str] = []
    for text in texts:
        groups, colon, rest = text.partition(":")
        waiting += [group.strip() for group in groups.split(",")]
        if not colon:
            continue  # environment variables are split at commas, so more groups follow
        name, equals, value = rest.partition("=")
        if not equals or not value or not _NAME.fullmatch(name):
            raise InvalidSettings(setting, "groups:key=value", _hidden(text))
        header = (prefix + name).lower()
        for group in waiting:
            if group not in list(Api):
                raise InvalidSettings(setting, f"one of {', '.join(Api)}", group)
            if Api(group) in found:
                raise InvalidSettings(setting, "each group once", group)
            found[Api(group)] = _Key(header, value.encode(), kind)
        waiting = []
    if waiting:
        raise InvalidSettings(setting, "groups:key=value", ",".join(waiting))
    return found


def _hidden(text: str) -> str:
    """Return the text without its secret value."""
    return text.partition("=")[0]
