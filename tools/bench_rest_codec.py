"""Time the codec of inference over HTTP: microseconds for a small request, MB/s for large tensors.

Prints, for JSON (flat and nested) and binary, the median of several runs of reading a request and
of writing its tensor as a response. Megabytes are those of the tensor, not of the text. All times
are CPU times of this thread, so other processes do not count.

`--gzip` instead compares, alternately, how long a client waits for an answer with and without
`Accept-Encoding: gzip`: for random floats in binary, which gzip hardly compresses, at most 1.1
times as long; and for numbers as JSON and for texts, which it does.
"""

import argparse
import asyncio
import http.client
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType

import msgspec
import numpy as np

from xlaserve.app.server import Application
from xlaserve.http.v2.infer_request import read_infer_request
from xlaserve.http.v2.infer_response import write_infer_response
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import InferOutput, InferRequest, InferResponse
from xlaserve.settings import Settings
from xlaserve.tensors import DATATYPES, Tensor, TensorSpec

FP32 = DATATYPES["FP32"]
INFO = ModelInfo("bench", (TensorSpec("x", FP32, (-1, 16)),), (TensorSpec("y", FP32, (-1, 16)),), 0)


@dataclass(frozen=True, slots=True)
class Case:
    """One encoding of a request, and the data of its answer."""

    name: str
    body: bytes
    header_length: int | None
    array: Tensor

    def read(self) -> InferRequest:
        """Read the request."""
        body = memoryview(self.body)
        return read_infer_request(INFO, "bench", "", body, self.header_length, max_depth=100)

    def write(self, request: InferRequest) -> None:
        """Write the answer in the encoding that the request asks for."""
        output = InferOutput("y", FP32, self.array)
        write_infer_response(request, InferResponse("bench", "1", "", (output,)))


def cases(array: Tensor) -> Iterator[Case]:
    """Encode one tensor in each form."""
    described = {"name": "x", "shape": array.shape, "datatype": "FP32"}
    forms = {"JSON, flat": array.ravel().tolist(), "JSON, nested": array.tolist()}
    for name, data in forms.items():
        body = msgspec.json.encode({"inputs": [described | {"data": data}]})
        yield Case(name, body, None, array)
    binary = described | {"parameters": {"binary_data_size": array.nbytes}}
    head = msgspec.json.encode({"inputs": [binary], "parameters": {"binary_data_output": True}})
    yield Case("binary", head + array.tobytes(), len(head), array)


def seconds_of(call: Callable[[], object], runs: int, calls: int) -> float:
    """Return the median over several runs, as seconds per call."""
    taken = []
    for _ in range(runs):
        start = time.thread_time()
        for _ in range(calls):
            call()
        taken.append((time.thread_time() - start) / calls)
    return median(taken)


# --- Cost of gzip to a client ------------------------------------------------------------------

_WAITED_BYTES = 8_000_000
MOST_TIMES = 1.1
"""Latency limit with gzip, relative to without, for hardly compressible data."""


def _octets() -> tuple[bytes, int]:
    array = np.random.default_rng(0).standard_normal(_WAITED_BYTES // 4).astype(np.float32)
    size = {"binary_data_size": array.nbytes}
    described = {"name": "x", "shape": array.shape, "datatype": "FP32", "parameters": size}
    head = msgspec.json.encode({"inputs": [described], "parameters": {"binary_data_output": True}})
    return head + array.tobytes(), len(head)


def _numbers() -> tuple[bytes, int]:
    data = np.random.default_rng(0).standard_normal(_WAITED_BYTES // 40).astype(np.float32)
    described = {"name": "x", "shape": data.shape, "datatype": "FP32", "data": data.tolist()}
    return msgspec.json.encode({"inputs": [described]}), 0


def _texts() -> tuple[bytes, int]:
    data = [f"the text of row {number}, and what it says" for number in range(_WAITED_BYTES // 400)]
    described = {"name": "x", "shape": [len(data)], "datatype": "BYTES", "data": data}
    return msgspec.json.encode({"inputs": [described]}), 0


WAITED: Mapping[str, tuple[str, Callable[[], tuple[bytes, int]]]] = MappingProxyType(
    {
        "8 MB of random floats": ("FP32", _octets),
        "numbers as JSON": ("FP32", _numbers),
        "texts as JSON": ("STRING", _texts),
    }
)
"""Name -> datatype of the model, and a function that makes the body and its JSON length."""


def wait(name: str, port: int, rounds: int, found: "multiprocessing.Queue[object]") -> None:
    """Request alternately with and without gzip; put median seconds and sizes into `found`."""
    datatype, make = WAITED[name]
    body, length = make()
    headers = {"Content-Type": "application/json"}
    if length:
        headers = {"Inference-Header-Content-Length": str(length)}
    client = http.client.HTTPConnection("127.0.0.1", port)
    seconds: dict[str, list[float]] = {"identity": [], "gzip": []}
    sizes = {}
    # Discard the first round, in which client and server still initialise.
    for number in range(rounds + 1):
        for coding, taken in seconds.items():
            start = time.perf_counter()
            said = {**headers, "Accept-Encoding": coding}
            client.request("POST", f"/v2/models/{datatype}/infer", body, said)
            answer = client.getresponse()
            sizes[coding] = len(answer.read())
            if answer.status != http.client.OK:
                raise RuntimeError(f"{name}: {answer.status}")
            if number:
                taken.append(time.perf_counter() - start)
    found.put(({coding: median(taken) for coding, taken in seconds.items()}, sizes))


async def waits(rounds: int) -> bool:
    """Print a line for each body; tell whether binary answers met MOST_TIMES."""
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "models")
        _write_models(root)
        settings = Settings.read(
            {}, repository=root, http_endpoint="port:0", grpc_endpoint="port:0", device="cpu"
        )
        application = Application(settings)
        async with application.running() as addresses:
            await application.load()
            port = int(str(addresses.http).rpartition(":")[2])
            context = multiprocessing.get_context("spawn")
            for name, (datatype, _) in WAITED.items():
                queue = context.Queue()
                client = context.Process(target=wait, args=(name, port, rounds, queue))
                client.start()
                seconds, sizes = await asyncio.to_thread(queue.get)
                await asyncio.to_thread(client.join)
                times = seconds["gzip"] / seconds["identity"]
                fine = fine and (name != next(iter(WAITED)) or times <= MOST_TIMES)
                print(
                    f"{name:22} {datatype:6} {seconds['identity'] * 1e3:6.1f} ms for "
                    f"{sizes['identity'] / 1e6:.2f} MB, with gzip {seconds['gzip'] * 1e3:6.1f} ms "
                    f"for {sizes['gzip'] / 1e6:.2f} MB: {times:.2f}x",
                    flush=True,
                )
    return fine


def _write_models(root: Path) -> None:
    for datatype in {datatype for datatype, _ in WAITED.values()}:
        tensor = {"data_type": f"TYPE_{datatype}", "dims": [-1]}
        config = {
            "backend": "identity",
            "input": [{"name": "x", **tensor}],
            "output": [{"name": "y", **tensor}],
        }
        (root / datatype / "1").mkdir(parents=True)
        (root / datatype / "config.json").write_text(json.dumps(config))


def main() -> int:
    """Print one line for each size and encoding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gzip", action="store_true", help="measure what clients wait for gzip")
    arguments = parser.parse_args()
    if arguments.gzip:
        return 0 if asyncio.run(waits(arguments.runs)) else 1
    runs = arguments.runs
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
