"""Bodies of SageMaker invocations: V2 requests or plain tensors."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec
import structlog

from xlaserve.errors import InvalidBody
from xlaserve.http.json.json_text import check_depth, check_members
from xlaserve.http.messages import BINARY_TYPE, JSON_TYPE, HttpRequest, HttpResponse
from xlaserve.http.sagemaker.plain_tensors import (
    JSONLINES_TYPE,
    choose_form,
    is_object,
    read_plain_request,
)
from xlaserve.http.v2.infer_request import read_header_length, read_infer_request
from xlaserve.http.v2.infer_response import HEADER_LENGTH, InferBody
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import InferRequest
from xlaserve.tensors import Parameter, TensorSpec

SAGEMAKER_BINARY_TYPE = "application/vnd.sagemaker-triton.binary+json"
"""V2 with binary tensors for platforms that drop headers: a parameter has the length of the
JSON."""

BINARY_TYPES = (SAGEMAKER_BINARY_TYPE, BINARY_TYPE)
_TEXT_TYPES = ("", JSON_TYPE, "text/csv", JSONLINES_TYPE)
_JSON_HEADER_SIZE = re.compile(r";\s*json-header-size\s*=\s*([^;]*)", re.IGNORECASE)
_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)

PARAMETER_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "X-Amzn-SageMaker-Target-Model": "sagemaker_target_model",
        "X-Amzn-SageMaker-Custom-Attributes": "sagemaker_custom_attributes",
    }
)
"""Headers passed to the model as request parameters."""
_MAX_PARAMETER_CHARACTERS = 1024
"""SageMaker's maximum length of custom attributes."""

_SHOWN = 80

_log = structlog.get_logger("sagemaker")


class _Kind(msgspec.Struct):
    """The members that distinguish a V2 request from plain tensors."""

    inputs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    instances: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_KIND = msgspec.json.Decoder(_Kind)


@dataclass(frozen=True, slots=True)
class Invocation:
    """A parsed invocation, and the media type of its response."""

    inference: InferRequest
    form: str
    is_v2: bool


class InvocationReader:
    """Decodes the bodies of invocations."""

    def __init__(self, max_json_depth: int, default_accept: str) -> None:
        self._max_json_depth = max_json_depth
        self._default_accept = default_accept

    def read(
        self, info: ModelInfo, model: str, request: HttpRequest, body: memoryview
    ) -> Invocation:
        """Decode a body for a model; raises InvalidBody and tensor errors."""
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
            others=BINARY_TYPES,
        )
        return Invocation(inference, form, is_v2=is_v2)

    def _is_v2(self, request: HttpRequest, body: memoryview) -> bool:
        """Distinguish a V2 request from plain tensors; raises InvalidBody."""
        if request.content_type in BINARY_TYPES:
            return True
        if request.content_type not in ("", JSON_TYPE):
            return False
        if HEADER_LENGTH in request.headers:
            return True
        check_depth(body, self._max_json_depth)
        check_members(body)
        if not is_object(body):
            return False
        try:
            kind = _KIND.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return True  # the V2 reader reports the error best
        return kind.instances is msgspec.UNSET or kind.inputs is not msgspec.UNSET


def v2_answer(body: InferBody) -> HttpResponse:
    """Return a V2 response, with its JSON length in the Content-Type and in Triton's header."""
    if body.header_length is None:
        return HttpResponse(parts=body.parts)
    return HttpResponse(
        content_type=f"{SAGEMAKER_BINARY_TYPE};json-header-size={body.header_length}",
        parts=body.parts,
        headers={HEADER_LENGTH: str(body.header_length)},
        compressible=False,
    )


def text_of(request: HttpRequest, body: memoryview) -> memoryview:
    """Return the part of a body that is parsed as text."""
    if request.content_type in BINARY_TYPES or HEADER_LENGTH in request.headers:
        return body[: _json_length(request)]
    return body if request.content_type in _TEXT_TYPES else body[:0]


def _json_length(request: HttpRequest) -> int | None:
    """Return how many bytes of a V2 body are JSON; None if all are.

    A body of the plain binary type without a length contains no JSON.
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


def parameters_of(model: str, request: HttpRequest) -> dict[str, Parameter]:
    """Return the platform's headers as request parameters, and log them."""
    found = {
        name: request.headers[header][:_MAX_PARAMETER_CHARACTERS]
        for header, name in PARAMETER_HEADERS.items()
        if header in request.headers
    }
    # Escape invalid UTF-8.
    found = {name: text.encode(errors="backslashreplace").decode() for name, text in found.items()}
    if found:
        _log.info("invoked", model=model, **found)
    return dict(found)
