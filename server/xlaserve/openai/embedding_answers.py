"""Serializes embedding responses in OpenAI's format."""

from base64 import b64encode
from collections.abc import Iterator
from typing import Literal

import msgspec

from xlaserve.http.json.json_tensors import JsonRules, NotInJson, write_elements
from xlaserve.openai.errors import InvalidField
from xlaserve.tensors import Buffer, Tensor, datatype_named

NUMBER_BYTES = 16
"""Upper bound of the bytes per number, in JSON or base64."""
_FP32 = datatype_named("FP32")


class Embedding(msgspec.Struct, kw_only=True):
    """The embedding of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    """Index of the input."""
    embedding: list[float] | str
    """Numbers, or base64 of little-endian FP32."""


class EmbeddingUsage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    """Tokens of all inputs, including special tokens but no padding."""
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The response to an embedding request."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    """The embeddings, in the order of the inputs."""
    model: str
    usage: EmbeddingUsage


def write(model: str, embeddings: Tensor, tokens: int, *, is_base64: bool) -> list[Buffer]:
    """Serialize an EmbeddingList of embeddings [inputs, size] FP32; return its parts.

    Raises InvalidField for NaN and infinity, which JSON cannot represent.
    """
    parts: list[Buffer] = [b'{"object":"list","data":[']
    for index, row in enumerate(embeddings):
        parts.append(
            b'%b{"object":"embedding","index":%d,"embedding":' % (b"," * (index > 0), index)
        )
        parts.extend(_base64(row) if is_base64 else _numbers(row, index))
        parts.append(b"}")
    usage = msgspec.json.encode(EmbeddingUsage(tokens, tokens))
    parts.append(b'],"model":%b,"usage":%b}' % (msgspec.json.encode(model), usage))
    return parts


def _base64(row: Tensor) -> Iterator[Buffer]:
    yield b'"%b"' % b64encode(row.astype("<f4", copy=False).tobytes())


def _numbers(row: Tensor, index: int) -> list[Buffer]:
    try:
        return write_elements(_FP32, row, JsonRules(strict=True))
    except NotInJson as error:
        raise InvalidField(
            "encoding_format", f"base64 for input {index}, whose embedding has {error}", "float"
        ) from None
