"""Time the codec of inference over HTTP: microseconds of a small request, megabytes of tensor a
second of large ones.

Prints, for JSON (flat and nested) and binary, the median of a few runs of reading a request and of
writing its tensor as a response. Megabytes are those of the tensor, not of the text. All times are
CPU times of this thread, so that other processes do not count.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import msgspec
import numpy as np

from xlaserve.core.serving.inference import InferOutput, InferRequest, InferResponse
from xlaserve.models.loaded import ModelInfo
from xlaserve.tensors import DATATYPES, Tensor, TensorSpec
from xlaserve.transport.rest.infer_request import read_infer_request
from xlaserve.transport.rest.infer_response import write_infer_response

FP32 = DATATYPES["FP32"]
INFO = ModelInfo("bench", (TensorSpec("x", FP32, (-1, 16)),), (TensorSpec("y", FP32, (-1, 16)),), 0)


@dataclass(frozen=True, slots=True)
class Case:
    """One form of a request, with what the answer to it is written from."""

    name: str
    body: bytes
    header_length: int | None
    array: Tensor

    def read(self) -> InferRequest:
        """Read the request."""
        body = memoryview(self.body)
        return read_infer_request(INFO, "bench", "", body, self.header_length, max_depth=100)

    def write(self, request: InferRequest) -> None:
        """Write the answer in the form that the request asks for."""
        output = InferOutput("y", FP32, self.array)
        write_infer_response(request, InferResponse("bench", "1", "", (output,)))


def cases(array: Tensor) -> Iterator[Case]:
    """Write one tensor in each form."""
    described = {"name": "x", "shape": array.shape, "datatype": "FP32"}
    forms = {"JSON, flat": array.ravel().tolist(), "JSON, nested": array.tolist()}
    for name, data in forms.items():
        body = msgspec.json.encode({"inputs": [described | {"data": data}]})
        yield Case(name, body, None, array)
    binary = described | {"parameters": {"binary_data_size": array.nbytes}}
    head = msgspec.json.encode({"inputs": [binary], "parameters": {"binary_data_output": True}})
    yield Case("binary", head + array.tobytes(), len(head), array)


def seconds_of(call: Callable[[], object], runs: int, calls: int) -> float:
    """Return the median of a few runs of so many calls, as seconds of one call."""
    taken = []
    for _ in range(runs):
        start = time.thread_time()
        for _ in range(calls):
            call()
        taken.append((time.thread_time() - start) / calls)
    return median(taken)


def main() -> None:
    """Print one line for each size and form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    random = np.random.default_rng(0)
    for rows, calls in ((1, 2000), (1 << 14, 1), (1 << 18, 1)):
        array = random.standard_normal((rows, 16)).astype(np.float32)
        for case in cases(array):
            reading = seconds_of(case.read, runs, calls)
            writing = seconds_of(partial(case.write, case.read()), runs, calls)
            times = ", ".join(
                f"{verb} {seconds * 1e6:9.1f} us {array.nbytes / seconds / 1e6:10.1f} MB/s"
                for verb, seconds in (("read", reading), ("write", writing))
            )
            print(f"{array.nbytes:>9} bytes, {case.name:<12}: {times}")


if __name__ == "__main__":
    main()
