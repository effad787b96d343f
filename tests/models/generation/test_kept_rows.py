"""Prefix caching with a compiled model: prompts with the same beginning reuse rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_language
from support.generators import CHUNK, Loaded, load, prompt_of
from support.tiny_language import VOCAB, greedy

from xlaserve.artifact import generator_record as record
from xlaserve.errors import InvalidModel
from xlaserve.generation.loading import GeneratorModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.generator import configured

LENGTH = 62
"""Not a multiple of the chunk: the padding of the last chunk exceeds the end."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GeneratorModel]:
    """A model with windows of 16 and 62 positions."""
    path = tiny_language.export(tmp_path_factory.mktemp("models") / "story" / "1")
    loaded = load(path, length=str(LENGTH))
    yield loaded
    loaded.close()


def test_tokens_are_those_without_kept_rows(model: GeneratorModel) -> None:
    """Prompts that extend, branch off, or shrink into a smaller window, all concurrently."""
    loaded, chance = Loaded(model), np.random.default_rng(3)
    trunk = prompt_of(LENGTH - 4, 1)
    prompts = [
        [*trunk[:length], *prompt_of(int(chance.integers(1, 4)), int(chance.integers(9)))]
        for length in [*range(4, LENGTH - 4, 3), 5, 6, 57, 5, 30]
    ]
    chance.shuffle(prompts)
    cached = []
    for group in (prompts[:9], prompts[9:], prompts):
        asked = [loaded.ask(prompt, max_tokens=3, logprobs=2) for prompt in group]
        loaded.wait_until_idle()
        for prompt, request in zip(group, asked, strict=True):
            assert greedy(prompt, min(3, LENGTH - len(prompt) + 1)) == request.tokens
        cached += [request.told["cached_tokens"] for request in asked]

    assert len(cached) // 2 < sum(count >= CHUNK for count in cached)


def test_a_seed_draws_the_same_behind_rows_of_others(model: GeneratorModel) -> None:
    """The draw depends on the position, not on which rows were computed."""
    loaded, sampled = Loaded(model), {"temperature": 1.5, "seed": 7, "ignore_eos": True}
    prompt = prompt_of(33, 77)
    first = loaded.ask(prompt, max_tokens=20, repetition_penalty=1.2, **sampled).tokens
    loaded.wait_until_idle()
    again = loaded.ask(prompt, max_tokens=20, repetition_penalty=1.2, **sampled)

    assert first == again.tokens
    assert 32 == again.told["cached_tokens"]
    loaded.wait_until_idle()


def test_a_cache_with_a_state_keeps_nothing(model: GeneratorModel) -> None:
    """Such a state covers all tokens so far, and cannot be had for a prefix."""
    arrays = [record.Array("float32", [record.SLOTS, record.LENGTH])]
    arrays += [record.Array("float32", [record.SLOTS, 8])]
    found: Any = record.Record(
        *(1, record.KIND, "0", ["cpu"], VOCAB, LENGTH, [], [], arrays), donated={}, files={}
    )

    def keeps(**parameters: str) -> bool:
        config = ModelConfig(parameters=parameters)
        return configured.read(found, Path(), config).keeps_prefixes

    assert model.generation.keeps_prefixes
    assert not keeps()
    with pytest.raises(InvalidModel, match="'prefix_cache': expected false, since an array of"):
        keeps(prefix_cache="true")


def test_a_model_that_fails_the_trial_keeps_nothing(model: GeneratorModel) -> None:
    info, plain = model.generation, ModelConfig()
    wanted = ModelConfig(parameters={configured.PREFIX_CACHE: "true"})

    assert not configured.without_prefixes(info, plain, "story").keeps_prefixes
    with pytest.raises(
        InvalidModel, match="'prefix_cache': expected false, since cached rows of equal"
    ):
        configured.without_prefixes(info, wanted, "story")
