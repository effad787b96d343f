"""Runs a whole server on a repository, infers with every model, and prints the compilations.

Run as a separate process, so that nothing compiled elsewhere is in memory.
"""

import asyncio
import json
import sys

import numpy as np
from support.compilations import noted_compilations

from xlaserve.app.server import Application
from xlaserve.serving.models_api import Models
from xlaserve.settings import Settings


async def main(repository: str, cache: str) -> dict[str, object]:
    """Serve and infer; return the compilations, the programs, and the answers."""
    settings = Settings.read(
        {},
        repository=repository,
        compilation_cache_directory=cache,
        compile_processes=0,
        grpc_endpoint="port:0",
        http_endpoint="none",
        device="cpu",
    )
    application = Application(settings)
    models = Models(application.engine)
    answers: dict[str, list[float]] = {}
    compiled_programs = cached_programs = 0
    with noted_compilations() as compiled:
        async with application.running():
            await application.load()
            for row in await application.rows():
                _, instance = application.registry.resolve(row.entry.name)
                compiled_programs += instance.info.compiled_programs
                cached_programs += instance.info.cached_programs
                x = np.linspace(0, 1, 4, dtype=np.float32)[None, :]
                found = await models.infer(row.entry.name, {"x": x})
                answers[row.entry.name] = found["y"].ravel().tolist()
    return {
        "compilations": len(compiled),
        "compiled_programs": compiled_programs,
        "cached_programs": cached_programs,
        "answers": answers,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
