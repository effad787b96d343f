"""Has a model of a replica on every device execute requests side by side; prints where, as JSON.

Run as a process of its own: how many devices the CPU plays is decided when JAX starts.
"""

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from xlaserve.app.server import Application
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.loaded import Value
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode
from xlaserve.tensors import DATATYPES

ROUNDS = 3


async def main(repository: Path, count: int) -> None:
    """Print how often each device executed, sending one concurrent request per device.

    The requests of a round wait for one another: no device may execute two of them.
    """
    used: Counter[str] = Counter()
    together = threading.Barrier(count, timeout=30)
    execute = JaxExportModel.execute

    def waiting(
        self: JaxExportModel,
        inputs: Mapping[str, Value],
        *,
        resident: bool = False,
        replica: int = 0,
    ) -> Mapping[str, Value]:
        together.wait()
        used.update(self._by_replica[replica].site.device_names)
        return execute(self, inputs, resident=resident, replica=replica)

    settings = Settings.read(
        {},
        repository=repository,
        model_control_mode=ModelControlMode.EXPLICIT,
        grpc_endpoint="port:0",
        http_endpoint="none",
        device="cpu",
        background_compile=False,
        compilation_cache_directory="none",
        scratch_directory=repository.parent,
        inline_execution_seconds=0.0,
        execute_threads=count,
    )
    application = Application(settings)
    async with application.running():
        await application.control.load("m")
        JaxExportModel.execute = waiting  # type: ignore[method-assign, assignment]
        for _ in range(ROUNDS):
            data = np.ones((1, 4), np.float32)
            request = InferRequest("m", inputs=(InferInput("x", DATATYPES["FP32"], data),))
            await asyncio.gather(*(application.engine.infer(request) for _ in range(count)))
    print(json.dumps(used))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
