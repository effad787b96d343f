"""The examples in examples/generation, end to end over a socket."""

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.server import Serve

from xlaserve.artifact import generator_record as record
from xlaserve.client import AsyncClient

FOLDER = Path(__file__).parents[2] / "examples" / "generation"
TOY = {"width": 16, "heads": 2, "layers": 2}
LENGTH = 64
PROMPT = [7, 8, 9, 10]

Load = Callable[[str], ModuleType]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Import an example as a script would be, with JAX's default configuration."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.enable_x64(False),
    ):
        yield importlib.import_module
    for name in {path.stem for path in FOLDER.glob("*.py")} - before:
        sys.modules.pop(name, None)


def greedy(logits: Callable[[Any], Any], prompt: list[int], count: int) -> list[int]:
    """Decode greedily without a cache, recomputing all tokens each time."""
    tokens = list(prompt)
    for _ in range(count):
        # Attention is causal: padding after a token does not affect it, so one size suffices.
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(logits(padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


async def streamed(url: str, prompt: list[int], count: int) -> list[int]:
    asked = {"tokens": np.array(prompt, np.int32)}
    parameters = {"max_tokens": count, "ignore_eos": True}
    async with AsyncClient(url, timeout=120) as client:
        answers = client.stream("story", asked, parameters=parameters)
        return [int(answer.tensors["token"][0]) async for answer in answers]


def test_the_gpt_is_exported_with_its_sizes(example: Load, tmp_path: Path) -> None:
    gpt, export = example("gpt"), example("export")
    params = gpt.initial(64, LENGTH, **TOY)
    tokenizer = tmp_path / export.TOKENIZER
    tokenizer.write_text('{"added_tokens": []}')
    found = record.read(export.write(params, 5, tokenizer, tmp_path / "story" / "1"))

    assert (64, LENGTH, [5]) == (found.vocab, found.max_length, found.stop_tokens)
    assert export.TOKENIZER in found.files
    assert 4 == len(found.cache)


@pytest.mark.slow  # compiles every operation separately
def test_the_cache_of_two_prompts_gives_what_whole_texts_give(example: Load) -> None:
    """A prompt in two chunks, the second padded past the end, next to another slot."""
    cached, gpt = example("cached"), example("gpt")
    params = gpt.initial(64, 8, **TOY)
    # Scale up the initial values, with which all tokens would be nearly equally likely.
    params = {name: 10 * array for name, array in params.items()}
    functions, window = gpt.cached(params), jnp.zeros(8, jnp.int8)
    texts = jnp.array([[1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3, 2]])
    expected = cached.whole(gpt.logits, params, texts)

    cache = functions.init_cache(params, 2, 8)
    for slot in (0, 1):
        _, cache = functions.chunk(params, cache, window, texts[slot, :4], slot, 0, 4)
        last = jnp.concatenate([texts[slot, 4:7], jnp.zeros(2, jnp.int32)])
        found, cache = functions.chunk(params, cache, window, last, slot, 4, 3)
        assert np.allclose(expected[slot, 6], found, atol=1e-4)
    # The last position, and one past the end, which must not change the slot.
    before = [held["key"][1] for held in cache]
    found, cache = functions.decode(params, cache, window, texts[:, 7], jnp.array([7, 8]))
    assert all(map(np.array_equal, before, (held["key"][1] for held in cache)))
    again, _ = functions.decode(params, cache, window, texts[:, 7], jnp.array([8, 7]))

    assert np.allclose(expected[0, 7], found[0], atol=1e-4)
    assert np.allclose(expected[1, 7], again[1], atol=1e-4)


@pytest.mark.slow
async def test_what_was_trained_answers_text_with_text(
    example: Load, serve: Serve, tmp_path: Path
) -> None:
    """Train twenty steps on Python's source text; compare with a loop without a cache."""
    cached, gpt, train, export, ask = map(example, ("cached", "gpt", "train", "export", "ask"))
    texts, _ = train.texts()
    tokenizer = train.trained_tokenizer(texts)
    tokens = train.tokens_of(tokenizer, texts)
    params = gpt.initial(tokenizer.get_vocab_size(), LENGTH, **TOY)
    before = float(train.loss(params, tokens[None, : LENGTH + 1]))
    params = train.train(params, tokens, 20)
    train.save(tmp_path / "trained", params, tokenizer)
    export.export(tmp_path / "trained", tmp_path / "models" / "story" / "1")

    prompt = "The with statement"
    ids = tokenizer.encode(prompt).ids
    logits = jax.jit(lambda tokens: cached.whole(gpt.logits, params, tokens))
    async with serve(tmp_path / "models", load_model=("story",)) as server:
        found = await streamed(server.url, ids, 40)

        def said() -> str:
            with ask.Client(server.url) as client:
                pieces = ask.answered(client, tokenizer, prompt, max_tokens=40, ignore_eos=True)
                return "".join(pieces)

        text = await asyncio.to_thread(said)

    assert float(train.loss(params, tokens[None, : LENGTH + 1])) < before - 0.3
    assert greedy(logits, ids, 40) == found
    assert tokenizer.decode(found) == text


def nnx_model(example: Load, version: Path) -> Callable[[Any], Any]:
    gpt, cached = example("gpt_nnx"), example("cached")
    model = gpt.GPT(64, LENGTH, **TOY, rngs=gpt.nnx.Rngs(0))
    gpt.export(model, version, stop_tokens=[0])
    definition, state = gpt.nnx.split(model)

    def logits(state: Any, tokens: Any, at: Any, remember: Any) -> Any:
        return gpt.nnx.merge(definition, state)(tokens, at, remember)

    return lambda tokens: cached.whole(logits, state, tokens)


def equinox_model(example: Load, version: Path) -> Callable[[Any], Any]:
    gpt, cached = example("gpt_equinox"), example("cached")
    model = gpt.GPT(64, LENGTH, **TOY, key=jax.random.key(0))
    # Scale up the positions, or random weights repeat one token.
    model = gpt.eqx.tree_at(lambda found: found.position, model, 10 * model.position)
    gpt.export(model, version, stop_tokens=[0])

    def logits(model: Any, tokens: Any, at: Any, remember: Any) -> Any:
        return model(tokens, at, remember)

    return lambda tokens: cached.whole(logits, model, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("made", [nnx_model, equinox_model])
async def test_a_framework_generates_what_its_own_forward_does(
    example: Load,
    serve: Serve,
    tmp_path: Path,
    made: Callable[[Load, Path], Callable[[Any], Any]],
) -> None:
    logits = jax.jit(made(example, tmp_path / "models" / "story" / "1"))
    async with serve(tmp_path / "models", load_model=("story",)) as server:
        found = await streamed(server.url, PROMPT, 40)

    assert greedy(logits, PROMPT, 40) == found
    assert 3 < len(set(found))
