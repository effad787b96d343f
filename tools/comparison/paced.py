"""Rows in which small requests come at a rate of their own, alone or beside a large one."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from comparison.kit import Kit

_GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"
_GRPC_HEADERS = ("content-type: application/grpc", "te: trailers")
_IMAGES = (8, 3, 224, 224)


@dataclass(frozen=True, slots=True)
class Paced:
    """Small requests at a fixed rate, with the load beside them."""

    rate: int
    """Requests a second, over all connections."""
    beside: str = ""
    """The name of a large load in LARGE; none where empty."""


def _images() -> np.ndarray:
    return np.random.RandomState(1).random_sample(_IMAGES).astype(np.float32)


def _json_body(kit: Kit) -> bytes:
    images = _images()
    data = [round(float(value), 6) for value in images.ravel()]
    tensor = {"name": "x", "shape": list(images.shape), "datatype": "FP32", "data": data}
    return json.dumps({"inputs": [tensor]}).encode()


def _zipped_body(kit: Kit) -> bytes:
    return gzip.compress(_json_body(kit), 1)


def _message(kit: Kit) -> bytes:
    return kit.body("big").read_bytes()


@dataclass(frozen=True, slots=True)
class Large:
    """A request that is large."""

    title: str
    make: Callable[[Kit], bytes]
    path: str
    headers: tuple[str, ...]
    over_http2: bool = False


_INFER_IMAGES = "/v2/models/image/infer"
_JSON = "content-type: application/json"
LARGE = {
    "message": Large(
        "messages of 64 MiB over gRPC", _message, _GRPC_PATH, _GRPC_HEADERS, over_http2=True
    ),
    "json": Large("JSON of 10 MB over REST", _json_body, _INFER_IMAGES, (_JSON,)),
    "gzip": Large(
        "the same JSON in gzip", _zipped_body, _INFER_IMAGES, (_JSON, "content-encoding: gzip")
    ),
}
"""The large loads by name. Pictures in files are not among them: no peer decodes them."""
