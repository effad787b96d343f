"""The answer to a request for embeddings, as OpenAI writes it."""

from base64 import b64encode
from collections.abc import Iterator
from typing import Literal

import msgspec

from xlaserve.http.json.json_tensors import JsonRules, NotInJson, write_elements
from xlaserve.openai.errors import InvalidField
from xlaserve.tensors import Buffer, Tensor, datatype_named

NUMBER_BYTES = 16
"""Bytes that a number of an embedding takes at most in JSON, and more than four in base64."""
_FP32 = datatype_named("FP32")


class Embedding(msgspec.Struct, kw_only=True):
    """The embedding of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    """Its place among the inputs."""
    embedding: list[float] | str
    """Numbers, or those as FP32, little-endian, in base64."""


class EmbeddingUsage(msgspec.Struct):
    """The numbers of tokens."""

    prompt_tokens: int
    """Tokens of all inputs, with special ones, without padding."""
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The answer to a request."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    """In the order of the inputs."""
    model: str
    usage: EmbeddingUsage


def write(model: str, embeddings: Tensor, tokens: int, *, is_base64: bool) -> list[Buffer]:
    """Write an EmbeddingList of embeddings [inputs, size] FP32, in pieces.

    Raises InvalidField for numbers that JSON does not have, NaN and infinities.
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
