"""Decoders compute what transformers computed for the same numbers and the same config.json."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from support.checkpoints import DATA, write_tensors

import huggingface_references as references
from xlaserve.importers.huggingface import checkpoint, configuration, forward
from xlaserve.importers.huggingface.form import Experts, Form, Rope

SLOT, SLOTS, LENGTH, PIECE = 2, 4, 48, 7
Logits = npt.NDArray[np.float32]


QUICK = ("gemma2", "gpt2", "smollm3", "granite", "olmo2")
"""Together they cover nearly every switch; the others run with the slow tests."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in references.CASES
    ]
)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def expected(name: str) -> tuple[npt.NDArray[np.int32], Logits]:
    with np.load(DATA / name / "references.npz") as found:
        return found["tokens"], found["logits"]


def on_device(form: Form, directory: Path) -> Any:
    return jax.tree.map(jnp.asarray, checkpoint.read(directory, form))


def prefilled(form: Form, params: Any, prompt: Any) -> tuple[jax.Array, forward.Cache]:
    """Return the logits after a prompt that was prefilled into the slot in pieces."""
    program = jax.jit(partial(forward.chunk, form))
    cache = forward.init_cache(form, jnp.float32, SLOTS, LENGTH)
    logits = jnp.zeros(0)
    for start in range(0, len(prompt), PIECE):
        piece = prompt[start : start + PIECE]
        padded = jnp.asarray(np.pad(piece, (0, PIECE - len(piece)), constant_values=5))
        window, place = jnp.zeros(LENGTH, jnp.int8), (SLOT, start, len(piece))
        logits, cache = program(params, cache, window, padded, *map(jnp.int32, place))
    return logits, cache


def continued(form: Form, params: Any, prompt: Any) -> tuple[list[int], Logits]:
    """Return tokens and logits of a greedy continuation, while other slots have other tokens."""
    program = jax.jit(partial(forward.decode, form))
    logits, cache = prefilled(form, params, prompt)
    found = [np.asarray(logits)]
    tokens = [int(np.argmax(found[-1]))]
    while len(tokens) < references.CONTINUED:
        step = len(tokens)
        asked = jnp.asarray([step, 9, tokens[-1], 100 - step], jnp.int32)
        # The position of the last slot is past the end: it must change no slot at all.
        places = jnp.asarray([step, 0, len(prompt) + step - 1, LENGTH], jnp.int32)
        rows, cache = program(params, cache, jnp.zeros(LENGTH, jnp.int8), asked, places)
        found.append(np.asarray(rows[SLOT]))
        tokens.append(int(np.argmax(found[-1])))
    for keys, values in cache:
        assert not np.asarray(keys[-1]).any()
        assert not np.asarray(values[-1]).any()
    return tokens, np.stack(found)


def test_logits_and_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """A prompt in pieces of 7 and 20 tokens in slot 2 of 4, within 1e-5 of the stored logits."""
    write_tensors(tmp_path, case)
    form = configuration.read(DATA / case)
    tokens, logits = expected(case)
    prompt = tokens[: references.PROMPT]
    greedy, found = continued(form, on_device(form, tmp_path), prompt)

    assert tokens[references.PROMPT :].tolist() == greedy
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-5)


def _mixture(name: str, **changes: Any) -> Experts:
    found = configuration.read(DATA / name).experts
    assert found is not None
    return replace(found, **changes)


def test_a_cache_has_the_frequencies_of_its_length() -> None:
    rope = Rope((1.0,), original=16, long_frequencies=(0.5,))
    turned = [forward._turns(rope, jnp.ones((1, 1), jnp.int32), length) for length in (16, 17)]

    assert [np.cos(1), np.cos(0.5)] == pytest.approx([float(cos[0, 0, 0, 0]) for cos, _ in turned])


WITHOUT = {
    "attention cap": ("gemma2", {"attention_cap": None}),
    "logit cap": ("gemma2", {"logit_cap": None}),
    "window": ("mistral", {"windows": (None, None)}),
    "window of one layer": ("qwen3", {"windows": (8, None)}),
    "mean of norms": ("gpt2", {"centred": False}),
    "rotation": ("llama-yarn", {"ropes": (Rope(),) * 2}),
    "windows of two in three": ("gemma3", {"windows": (None,) * 3}),
    "a long cache": ("phi3-long", {"ropes": configuration.read(DATA / "phi3-short").ropes}),
    "shares that sum to 1": ("mixtral", {"experts": _mixture("mixtral", normalised=False)}),
    "shares as they are": ("qwen2-moe", {"experts": _mixture("qwen2-moe", normalised=True)}),
    "all experts of a token": ("qwen3-moe", {"experts": _mixture("qwen3-moe", chosen=2)}),
    "a layer without positions": (
        "smollm3",
        {"ropes": (configuration.read(DATA / "smollm3").ropes[0],) * 4},
    ),
    "a factor of the residuals": ("granite", {"residual_scale": 1.0}),
    "a factor of the embedding": ("granite", {"embedding_scale": 1.0}),
    "a factor of the attention": ("granite", {"attention_scale": 0.25}),
    "a divisor of the logits": ("granite", {"logit_divisor": 1.0}),
    "the shared expert": ("qwen2-moe", {"experts": _mixture("qwen2-moe", shared=0)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("lacking", WITHOUT)
def test_the_references_tell_what_config_json_says(lacking: str, tmp_path: Path) -> None:
    """A reference that a decoder without the switch also matched would prove nothing."""
    name, changes = WITHOUT[lacking]
    write_tensors(tmp_path, name)
    form = configuration.read(DATA / name)
    params = on_device(form, tmp_path)
    tokens, logits = expected(name)
    changed = replace(form, **changes)  # type: ignore[arg-type]
    found, _ = prefilled(changed, params, tokens[: references.PROMPT])

    assert np.abs(np.asarray(found) - logits[0]).max() > 1e-3
