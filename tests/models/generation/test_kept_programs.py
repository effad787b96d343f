"""Generators with cached programs: nothing is compiled, and the results are equal."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import jax
import pytest
from support import tiny_language
from support.compilations import noted_compilations
from support.generators import CONFIG, Loaded, prompt_of

from xlaserve.generation.loading import GeneratorModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.runtime.programs import cache_key
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.compilation_cache import CompilationCache, Entry


class Bed:
    """A model, and a cache that its first load has filled."""

    def __init__(self, folder: Path) -> None:
        self.path = tiny_language.export(folder / "story" / "1")
        self.cache = CompilationCache(folder / "cache", 1 << 30)
        self.target = cache_key.target_of("cpu", str(jax.devices("cpu")[0].device_kind))
        self.kept = self.cache.prepare(self.target)

    def load(self) -> tuple[ModelInfo, list[list[int]], int]:
        """Return the model info, the tokens of some requests, and the number of compilations."""
        context = LoadContext("story", "1", ModelConfig(parameters=CONFIG))
        with noted_compilations() as compiled:
            model = loaders.load(self.path, replace(context, compilation=Compilation(self.cache)))
            assert isinstance(model, GeneratorModel)
            loaded = Loaded(model)
            asked = [
                loaded.ask(prompt_of(length), seed=1, temperature=temperature, max_tokens=9)
                for length, temperature in ((3, 0), (20, 1.5), (20, 0), (41, 2.0))
            ]
            found = [request.tokens for request in asked]
            loaded.wait_until_idle()
            model.close()
        return model.info, found, len(compiled)


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bed, list[list[int]]]:
    found = Bed(tmp_path_factory.mktemp("models"))
    info, tokens, compiled = found.load()
    assert info.cached_programs == 0
    # At most: JAX keeps the programs of functions that an earlier test has compiled.
    assert 0 < compiled <= info.compiled_programs == len(list(found.kept.glob("*.json")))
    return found, tokens


def test_second_load_compiles_nothing_and_answers_alike(bed: tuple[Bed, list[list[int]]]) -> None:
    """Neither the zeroed cache nor the tables of a request are compiled again."""
    made, tokens = bed
    info, found, compiled = made.load()

    assert (compiled, info.compiled_programs) == (0, 0)
    assert info.cached_programs == len(list(made.kept.glob("*.json")))
    assert found == tokens


@pytest.mark.slow
def test_programs_that_fail_are_compiled_anew(bed: tuple[Bed, list[list[int]]]) -> None:
    """Two programs with different arguments are swapped: they load, but cannot be executed."""
    made, tokens = bed
    entries: dict[str, Entry] = {}
    for name in sorted(path.stem for path in made.kept.glob("*.json")):
        entry = made.cache.read(made.target, name)
        assert isinstance(entry, Entry)
        entries[name] = entry
    # Two with as many arguments but different windows: both of decode, or both of chunk.
    one, other = next(
        pair
        for pair in combinations(entries, 2)
        for arguments in [[entries[name].program["arguments"] for name in pair]]
        if arguments[0] != arguments[1] and arguments[0].count(";") == arguments[1].count(";") > 2
    )
    for name, executable in ((one, entries[other].executable), (other, entries[one].executable)):
        made.cache.write(made.target, name, replace(entries[name], executable=executable))

    info, found, _ = made.load()

    assert (info.cached_programs, info.compiled_programs) == (0, len(entries))
    assert found == tokens
    assert made.load()[2] == 0, "they are in the cache again"
