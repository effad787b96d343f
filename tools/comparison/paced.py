"""Rows in which small requests arrive at a fixed rate, alone or next to a large one."""

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
    """Small requests at a fixed rate, and the large load that runs at the same time."""

    rate: int
    """Requests per second, over all connections."""
    beside: str = ""
    """Name of a large load in LARGE; empty for none."""


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
    """A large request."""

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
"""The large loads by name. Encoded pictures are not among them, as no peer decodes them."""
