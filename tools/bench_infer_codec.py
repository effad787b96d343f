"""Time the codec of ModelInfer on usual requests, beside the generic codec.

Prints nanoseconds of decode, of request and of encode, the best of a few runs each, their sum, and
the time of the generic codec for all three; then how many blocks of memory one request holds with
its response. All times are CPU times of this thread, so that other processes do not count.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from xlaserve.grpc.infer.infer_codec import InferCodec
from xlaserve.grpc.infer.tensors import read_request, write_outputs
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.serving.inference import InferOutput, InferResponse
from xlaserve_proto import inference as pb

_INNER_SECONDS = 0.02


def tensor(name: str, datatype: str, shape: list[int], **more: Any) -> Any:
    """Make an input."""
    return pb.ModelInferRequestInferInputTensor(name=name, datatype=datatype, shape=shape, **more)


def request(inputs: list[Any], raw: list[bytes], **more: Any) -> pb.ModelInferRequest:
    """Make a request as clients send them."""
    return pb.ModelInferRequest(
        model_name="identity", id="4f1d", inputs=inputs, raw_input_contents=raw, **more
    )


def _parameter(value: int) -> dict[str, pb.InferParameter]:
    return {"p": pb.InferParameter(int64_param=value)}


def usual() -> dict[str, pb.ModelInferRequest]:
    """Return the requests to time, by what to call them."""
    typed = pb.InferTensorContents(fp32_contents=[0.5] * 784)
    return {
        "FP32 [1,16] raw": request([tensor("INPUT0", "FP32", [1, 16])], [bytes(64)]),
        "BYTES [8] raw": request([tensor("INPUT0", "BYTES", [8])], [b"\4\0\0\0abcd" * 8]),
        "FP32 [1,784] typed": request([tensor("INPUT0", "FP32", [1, 784], contents=typed)], []),
        "FP32 [1,3,224,224] raw": request(
            [tensor("INPUT0", "FP32", [1, 3, 224, 224])], [bytes(4 * 3 * 224 * 224)]
        ),
        "two inputs with parameters": request(
            [
                tensor("INPUT0", "FP32", [1, 16], parameters=_parameter(1)),
                tensor("INPUT1", "INT64", [1, 16], parameters=_parameter(2)),
            ],
            [bytes(64), bytes(128)],
            parameters=_parameter(3),
        ),
    }


def best_ns(call: Callable[[], object], runs: int) -> float:
    """Time one call, as the best of a few runs of many."""
    count, took = 1, 0.0
    while took < _INNER_SECONDS:
        count *= 2
        took = _seconds(call, count)
    return 1e9 / count * min(took, *(_seconds(call, count) for _ in range(runs)))


def _seconds(call: Callable[[], object], count: int) -> float:
    started = time.thread_time()
    for _ in range(count):
        call()
    return time.thread_time() - started


def objects_of(call: Callable[[], object]) -> int:
    """Count the blocks of memory that are held by what a call returns."""
    call()
    gc.collect()
    before = sys.getallocatedblocks()
    held = call()
    after = sys.getallocatedblocks()
    del held
    return after - before


def answer(read: Any) -> InferResponse:
    """Return the response of an identity model."""
    outputs = tuple(InferOutput("OUTPUT0", one.datatype, one.data) for one in read.inputs)
    return InferResponse(read.model_name, "1", read.id, outputs)


def directly(codec: InferCodec, data: bytes) -> object:
    """Read and answer, and return everything that was made on the way."""
    decoded = codec.decode(data)
    response = answer(decoded.request())
    return decoded, response, codec.encode(response)


def generic(codec: WireCodec, data: bytes) -> bytes:
    """Read and answer by way of message objects."""
    response = answer(read_request(codec.decode_message(pb.ModelInferRequest, data)))
    outputs, raw = write_outputs(response.outputs)
    return codec.encode_message(
        pb.ModelInferResponse(
            model_name=response.model_name,
            model_version=response.model_version,
            id=response.id,
            outputs=outputs,
            raw_output_contents=raw,
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="of each measurement (default 7)")
    runs = parser.parse_args().runs
    codec, wire = InferCodec(max_fields=100_000, max_depth=100), WireCodec()
    gc.collect()
    gc.freeze()
    print(f"{'ns':28}{'decode':>9}{'request':>9}{'encode':>9}{'sum':>9}{'generic':>10}{'held':>6}")
    for name, message in usual().items():
        data = wire.encode_message(message)
        decoded = codec.decode(data)
        response = answer(decoded.request())
        steps = partial(codec.decode, data), decoded.request, partial(codec.encode, response)
        times = [best_ns(step, runs) for step in steps]
        slow = best_ns(partial(generic, wire, data), runs)
        held = objects_of(partial(directly, codec, data))
        print(f"{name:28}" + "".join(f"{t:9.0f}" for t in (*times, sum(times))), end="")
        print(f"{slow:10.0f}{held:6}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
