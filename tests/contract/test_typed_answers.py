"""Requests with typed contents are answered in typed contents (V2 protocol, ModelInferResponse)."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support import identity_models, typed_contract
from support.engines import own_engine_only
from support.server import RunningServer, Serve
from tritonclient.grpc import service_pb2

from xlaserve.settings.choices import TypedAnswerForm
from xlaserve.tensors import BYTES, DATATYPES, Datatype, to_bytes

METHOD = "/inference.GRPCInferenceService/ModelInfer"
ELEMENTS: Mapping[str, Sequence[Any]] = {
    "BOOL": [True, False, True, True],
    "UINT8": [0, 1, 254, 255],
    "UINT16": [0, 1, 2, 2**16 - 1],
    "UINT32": [0, 1, 127, 2**32 - 1],
    "UINT64": [0, 1, 128, 2**64 - 1],
    "INT8": [-128, -1, 0, 127],
    "INT16": [-(2**15), -1, 0, 2**15 - 1],
    "INT32": [-(2**31), -1, 0, 2**31 - 1],
    "INT64": [-(2**63), -1, 0, 2**63 - 1],
    "FP32": [-1.5, 0.0, 0.25, float("inf")],
    "FP64": [-1.5, 0.1, 1e300, float("-inf")],
    "BYTES": [b"", b"\xff\x00", "é".encode(), b"text"],
}
TYPED = [DATATYPES[name] for name in ELEMENTS]
WAYS = [
    None,
    pytest.param(grpc.Compression.Gzip, marks=own_engine_only),
    pytest.param(grpc.Compression.Deflate, marks=own_engine_only),
]
"""Compressed requests take the general path, others the fast path."""
MANY = 100
"""More elements than are encoded one by one."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An identity model for each datatype."""
    root = tmp_path_factory.mktemp("models")
    for row in TYPED:
        identity_models.write(root, row.name, row.name)
    return root


def request_for(row: Datatype, elements: Sequence[Any]) -> Any:
    request = typed_contract.ModelInferRequest(model_name=row.name, id="7")
    tensor = request.inputs.add(name="x", datatype=row.name, shape=[len(elements)])
    assert row.contents is not None
    getattr(tensor.contents, row.contents).extend(elements)
    return request


async def ask(server: RunningServer, request: Any, **options: Any) -> bytes:
    """Return the serialized answer."""
    async with grpc.aio.insecure_channel(server.url, **options) as channel:
        answer: bytes = await channel.unary_unary(METHOD)(request.SerializeToString(), timeout=20)
    return answer


def contents(answer: bytes, row: Datatype) -> list[Any]:
    """Return the elements as seen by a client that ignores raw contents."""
    (output,) = typed_contract.ModelInferResponse.FromString(answer).outputs
    assert row.contents is not None
    filled = [field.name for field, _ in output.contents.ListFields()]
    assert filled in ([], [row.contents])
    return list(getattr(output.contents, row.contents))


def raw(answer: bytes) -> list[bytes]:
    return list(service_pb2.ModelInferResponse.FromString(answer).raw_output_contents)


def raw_bytes(row: Datatype, elements: Sequence[Any]) -> bytes:
    return bytes(to_bytes(row, np.array(elements, row.dtype)))


@pytest.mark.parametrize("compression", WAYS)
@pytest.mark.parametrize("form", TypedAnswerForm)
async def test_a_client_without_raw_fields_sees_every_datatype(
    serve: Serve, repository: Path, form: TypedAnswerForm, compression: Any
) -> None:
    async with serve(repository, load_model=("*",), typed_answers=form) as server:
        for row in TYPED:
            for elements in (ELEMENTS[row.name], [*ELEMENTS[row.name]] * MANY, []):
                request = request_for(row, elements)
                answer = await ask(server, request, compression=compression)
                (output,) = typed_contract.ModelInferResponse.FromString(answer).outputs

                assert (row.name, [len(elements)]) == (output.datatype, list(output.shape))
                typed = [] if form is TypedAnswerForm.RAW else [*elements]
                assert typed == contents(answer, row)
                expected = [] if form is TypedAnswerForm.TYPED else [raw_bytes(row, elements)]
                assert expected == raw(answer)


async def test_a_raw_request_is_answered_raw(serve: Serve, repository: Path) -> None:
    elements = ELEMENTS["INT32"]
    request = service_pb2.ModelInferRequest(
        model_name="INT32", raw_input_contents=[raw_bytes(DATATYPES["INT32"], elements)]
    )
    request.inputs.add(name="x", datatype="INT32", shape=[len(elements)])
    async with serve(repository, load_model=("INT32",), typed_answers="typed") as server:
        answer = await ask(server, request)

    assert [raw_bytes(DATATYPES["INT32"], elements)] == raw(answer)
    assert [] == contents(answer, DATATYPES["INT32"])


@pytest.mark.parametrize("compression", WAYS)
@pytest.mark.parametrize("row", [DATATYPES["INT64"], BYTES])
async def test_an_answer_that_would_grow_too_long_is_raw_alone_or_refused(
    serve: Serve, repository: Path, row: Datatype, compression: Any
) -> None:
    elements = [*ELEMENTS[row.name]] * MANY
    request = request_for(row, elements)
    limit = {"load_model": (row.name,), "max_typed_answer_bytes": 9 * len(elements)}
    async with serve(repository, **limit) as server:
        answer = await ask(server, request, compression=compression)
        short = await ask(server, request_for(row, elements[:1]), compression=compression)
    async with serve(repository, **limit, typed_answers=TypedAnswerForm.TYPED) as server:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(server, request, compression=compression)

    assert ([], [raw_bytes(row, elements)]) == (contents(answer, row), raw(answer))
    assert elements[:1] == contents(short, row)
    assert grpc.StatusCode.RESOURCE_EXHAUSTED is refused.value.code()
    assert "max_typed_answer_bytes" in str(refused.value.details())
