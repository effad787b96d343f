"""`xlaserve plan` and `xlaserve warm` of a generator, compared with a real load."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from support import tiny_language
from support.process import command, run

from xlaserve.generation.loading import GeneratorModel
from xlaserve.model_config.text import read_config
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.programs import cache_key
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.compilation_cache import CompilationCache

CONFIG = {"slots": "2", "length": "32", "windows": "32", "chunk": "8", "step_sizes": "1"}
PROGRAMS = 6
"""Initial state, start of a request, token, chunk, copy of rows, and a step of one row."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    tiny_language.export(path / "tiny" / "1")
    parameters = {name: {"string_value": value} for name, value in CONFIG.items()}
    (path / "tiny" / "config.json").write_text(json.dumps({"parameters": parameters}))
    return path


def loaded(repository: Path, compilation: Compilation) -> GeneratorModel:
    config = read_config(repository / "tiny")
    context = LoadContext("tiny", "1", config, compilation=compilation)
    with jax.enable_x64(True):  # with a server's settings
        model = loaders.load(repository / "tiny" / "1", context)
    assert isinstance(model, GeneratorModel)
    return model


@pytest.mark.slow
async def test_a_plan_reserves_what_a_load_books_and_warming_leaves_nothing_to_compile(
    repository: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    status, out, err = await run(
        *command("plan", str(repository), "--target", "cpu", "--json", "--cache", str(tmp_path))
    )
    assert 0 == status, err
    (planned,) = json.loads(out)["models"]
    status, out, err = await run(
        *command("warm", str(repository), "--target", "cpu", "--cache", str(cache), "--json")
    )
    assert 0 == status, err
    warmed: dict[str, Any] = json.loads(out.splitlines()[0])

    kept = CompilationCache(cache, 1 << 30)
    kept.prepare(cache_key.target_of("cpu", str(jax.devices("cpu")[0].device_kind)))
    model = loaded(repository, Compilation(kept))
    memory = model.info.memory
    model.close()

    assert (PROGRAMS, 0, "") == (warmed["compiled"], warmed["cached"], warmed["problem"])
    assert (PROGRAMS, 0) == (model.info.cached_programs, model.info.compiled_programs)
    assert PROGRAMS == len(planned["programs"])
    assert memory.states_bytes == planned["reserved"]["states_bytes"] > 0
    assert memory.temporaries_bytes == planned["reserved"]["temporaries_bytes"] > 0
    assert {"cpu:0": memory.total_bytes} == planned["reserved"]["per_device"]


async def test_what_is_odd_in_a_generator_is_its_problem(repository: Path, tmp_path: Path) -> None:
    """The problem is named, instead of a missing model.json for every generator."""
    odd = tmp_path / "tiny" / "1"
    odd.mkdir(parents=True)
    for file in (repository / "tiny" / "1").iterdir():
        (odd / file.name).write_bytes(file.read_bytes())
    (odd / "decode.jaxexp").write_bytes(b"no program")

    status, out, _ = await run(*command("plan", str(tmp_path), "--target", "cpu", "--json"))
    (planned,) = json.loads(out)["models"]

    assert 1 == status
    assert "decode.jaxexp" in planned["problem"]["reason"]
