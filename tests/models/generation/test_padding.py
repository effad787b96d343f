"""Chunk padding: values computed after the last prompt token affect nothing."""

from collections.abc import Iterator
from threading import Event
from typing import Any

import numpy as np
import pytest
from support import tiny_language
from support.generators import CHUNK, Asking, Loaded, load, prompt_of
from support.tiny_language import VOCAB, greedy

from xlaserve.generation.loading import GeneratorModel

LENGTH = 62
"""Not a multiple of the chunk: the padding of the last chunk exceeds the end."""
LENGTHS = (*range(2, CHUNK + 4), *range(15, 20), *range(LENGTH - CHUNK - 2, LENGTH + 1))
"""Every remainder of a chunk, around the window bounds, and up to the last position."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GeneratorModel]:
    """A model with windows of 8, 16 and 62 positions."""
    path = tiny_language.export(tmp_path_factory.mktemp("models") / "story" / "1")
    loaded = load(path, windows="8,16", length=str(LENGTH))
    yield loaded
    loaded.close()


def asked(
    model: GeneratorModel, monkeypatch: pytest.MonkeyPatch, pad: int | None = None
) -> tuple[list[Asking], list[tuple[int, int]]]:
    """Ask with prompts of all lengths concurrently; the answers outgrow their windows.

    Also return the tokens at the end of each chunk. The first request waits until all are sent, so
    that steps have the same members, and thus the same windows, however busy the machine is.
    """
    programs: Any = model._programs
    prefill, chunks, have_asked = programs.prefill, [], Event()

    def prefill_padded(window: int, tokens: Any, slot: int, start: int, count: int) -> None:
        assert have_asked.wait(60)
        chunks.append((count, start + len(tokens)))
        if pad is not None:
            tokens[count:] = pad
        prefill(window, tokens, slot, start, count)

    with monkeypatch.context() as patched:
        patched.setattr(programs, "prefill", prefill_padded)
        loaded = Loaded(model)
        found = [loaded.ask(prompt_of(size, size), max_tokens=12, logprobs=3) for size in LENGTHS]
        have_asked.set()
        loaded.wait_until_idle()
    return found, chunks


@pytest.mark.slow
@pytest.mark.parametrize("pad", [1, VOCAB - 1])
def test_tokens_of_padding_change_nothing(
    model: GeneratorModel, pad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one bit of a log-probability, in any window, nor at the last position."""
    plain, chunks = asked(model, monkeypatch)
    found, padded = asked(model, monkeypatch, pad)

    assert chunks == padded
    assert set(range(1, CHUNK + 1)) == {count for count, _ in padded}
    assert LENGTH < max(end for _, end in padded)
    for size, one, other in zip(LENGTHS, plain, found, strict=True):
        assert greedy(prompt_of(size, size), min(12, LENGTH - size + 1)) == other.tokens
        for answer, again in zip(one.answers, other.answers, strict=True):
            for name, value in answer.items():
                np.testing.assert_array_equal(value, again[name])
