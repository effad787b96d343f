"""The comparison of generators: all get the same model and the same work."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from compare_generation import AGREED, BURSTS, agree, beside_long_prompts, compare
from generation_contenders import Measured, Request, Streaming, measured
from llama_cpp_peer import gguf_name, turned


class Fake:
    """A named contender that answers with given tokens and records its requests."""

    def __init__(self, name: str, tokens: Sequence[int] = ()) -> None:
        self.name = name
        self._tokens = list(tokens)
        self.asked: list[Sequence[Request]] = []

    async def run(self, requests: Sequence[Request]) -> Measured:
        self.asked.append(requests)
        return Measured(float(len(requests)), [1.0])

    async def tokens(self, prompt: list[int], count: int) -> list[int]:
        return self._tokens


class Even(Streaming):
    """A server that sends one event per loop iteration: 50 for a long prompt, 30 for others."""

    def __init__(self) -> None:
        self.name = "even"
        self.prompts: list[int] = []

    async def events(self, prompt: list[int], count: int) -> AsyncIterator[tuple[float, bytes]]:
        self.prompts.append(len(prompt))
        for _ in range(50 if count == 1 else 30):
            await asyncio.sleep(0)
            yield time.perf_counter(), b"data: {}"

    def token(self, event: Mapping[str, Any]) -> int | None:
        return None


def test_rotation_of_llama_cpp_gives_the_same_products_of_queries_and_keys() -> None:
    """Only the product of q and k is used, which the order of their rows does not change."""
    heads, dim, hidden, position = 3, 8, 5, 7
    random = np.random.default_rng(0)
    q, k = (random.standard_normal((heads * dim, hidden)) for _ in range(2))
    x = random.standard_normal(hidden)
    angles = position / 10_000 ** (np.arange(dim // 2) / (dim // 2))
    turn = np.exp(1j * angles)

    def halves(matrix: Any) -> Any:
        """Return the pairs that Hugging Face rotates together, as complex numbers."""
        rows = (matrix @ x).reshape(heads, dim)
        return rows[:, : dim // 2] + 1j * rows[:, dim // 2 :]

    def pairs(matrix: Any) -> Any:
        """Return the pairs that llama.cpp rotates together."""
        rows = (turned(matrix, heads) @ x).reshape(heads, dim)
        return rows[:, ::2] + 1j * rows[:, 1::2]

    expected = ((halves(q) * turn) * np.conj(halves(k))).real.sum(axis=1)

    np.testing.assert_allclose(((pairs(q) * turn) * np.conj(pairs(k))).real.sum(axis=1), expected)


def test_tensors_have_the_names_of_llama_cpp() -> None:
    assert gguf_name("lm_head.weight") == "output.weight"
    assert gguf_name("model.layers.11.self_attn.o_proj.weight") == "blk.11.attn_output.weight"
    with pytest.raises(KeyError):
        gguf_name("model.layers.0.self_attn.q_norm.weight")


async def test_contender_of_another_model_ends_the_comparison(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A near tie may end the agreement, but not at the first token."""
    ours = list(range(AGREED))
    near = [*ours[:9], *[0] * (AGREED - 9)]

    await agree([Fake("ours", ours), Fake("near", near)])
    assert "near: the first 9 of" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="far has another model"):
        await agree([Fake("ours", ours), Fake("far", ours[::-1])])


async def test_all_have_the_same_requests_and_no_prompt_comes_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cached rows of a repeated prompt would save a contender work that others do."""
    one, other = Fake("one"), Fake("other")

    rates = await compare([one, other], rounds=2, rate=1.0, longest=10)
    prompts = [tuple(each.prompt) for asked in one.asked for each in asked]

    assert one.asked == other.asked
    assert len(set(prompts)) == len(prompts)
    assert all(2 <= each.count <= 10 for asked in one.asked[1:] for each in asked)
    assert rates[f"burst of {BURSTS[-1]}"] == BURSTS[-1]
    assert "| burst of 4 | 4.0 | 4.0 | 1.00 | 1.00 / 1.00 |" in capsys.readouterr().out


def test_rate_is_of_the_tokens_that_were_asked_for() -> None:
    """Measured from when the first request was due until the last answer ended."""
    requests = [Request(1.0, [3], 10), Request(2.0, [3], 30)]

    found = measured(requests, 100.0, [103.0, 106.0])

    assert found == Measured(40 / 5, [2.0, 4.0])


async def test_gaps_beside_long_prompts_are_those_of_running_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An answer that ends before the long prompts do is followed by another one."""
    server = Even()

    assert await beside_long_prompts(server, 2) >= 1
    assert server.prompts.count(1000) == 2
    assert server.prompts.count(64) > 4
    assert "beside 2 prompts of 1000" in capsys.readouterr().out
