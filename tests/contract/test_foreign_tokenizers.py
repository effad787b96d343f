"""Texts for which a tokenizer would compute for hours, at each door, beside other callers."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from support import scripted_language, tiny_embedding
from support.http import Answer, ask
from support.server import RunningServer, serving
from tritonclient.utils import InferenceServerException

from xlaserve.core.serving.access.tokens import digest_of, new_token
from xlaserve.language import tokenizing
from xlaserve.language.limited import Limits

pytestmark = pytest.mark.asyncio(loop_scope="module")

BACKTRACKING, PANICKING = "(?:a|b)+(?:a|b)+[cx]", "(a+)+[bx]"
"""One takes too much of any text, the other too much of one match, at which the library panics."""
LONG, SHORT = "ab" * 700, "a" * 60
TOO_LONG = "takes more than 0.2 seconds of the processor"
HOSTILE, GOOD = new_token(), new_token()
SCRIPT = "well"
MOST = {"max_tokens": 4, "temperature": 0}


@dataclass(frozen=True)
class Place:
    server: RunningServer

    async def post(self, path: str, body: Any, token: str = HOSTILE) -> Answer:
        headers = ("Authorization", f"Bearer {token}")
        return await ask(self.http, "POST", path, headers, body=json.dumps(body).encode())

    @property
    def http(self) -> str:
        assert self.server.http is not None
        return self.server.http

    async def good(self, model: str) -> str:
        """Return what a model answers another caller."""
        body = {"model": model, "prompt": "a0", **MOST}
        found = await self.post("/v1/completions", body, GOOD)
        assert found.status == 200
        text: str = json.loads(found.body)["choices"][0]["text"]
        return text


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="place")
async def _place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("tokenizers")
    models = folder / "models"
    scripted_language.export(models / "plain", [SCRIPT], scripted_language.HERMES)
    shutil.copytree(models / "plain", models / "slow")
    tiny_embedding.export(models / "words")
    make_slow(models / "slow" / "1" / "tokenizer.json", BACKTRACKING)
    make_slow(models / "words" / "1" / "tokenizer.json", PANICKING)
    may = {"allow": ["infer", "metadata", "health"]}
    callers = {"hostile": HOSTILE, "good": GOOD}
    rules = [{"name": n, "token": digest_of(token), **may} for n, token in callers.items()]
    (folder / "rules.json").write_text(json.dumps({"caller": rules}))
    running = serving(
        folder,
        models,
        load_model=("plain", "slow", "words"),
        http_endpoint="port:0",
        access_rules=str(folder / "rules.json"),
    )
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(tokenizing, "LIMITS", Limits(cpu_seconds=0.2, memory_bytes=512 << 20))
        async with running as server:
            yield Place(server)


def make_slow(path: Path, regex: str) -> None:
    """Give a tokenizer a regular expression that goes back and forth."""
    found = json.loads(path.read_text())
    pattern = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
    parts = [pattern | {"invert": False}, found["pre_tokenizer"]]
    found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*filter(None, parts)]}
    path.write_text(json.dumps(found))


async def over_grpc(place: Place, text: str) -> tuple[str, str]:
    tensor = triton.InferInput("text", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text], object))
    headers = {"authorization": f"Bearer {HOSTILE}"}
    async with triton.InferenceServerClient(place.server.url) as client:
        try:
            await client.infer("slow", [tensor], headers=headers, parameters=MOST)
        except InferenceServerException as error:
            return error.status() or "", error.message()
    return "OK", ""


async def over_rest(place: Place, path: str, body: Any) -> tuple[str, str]:
    found = await place.post(path, body)
    return str(found.status), found.body.decode()


Door = Callable[[Place, str], Awaitable[tuple[str, str]]]


def rest(path: str, body: Callable[[str], Mapping[str, Any]]) -> Door:
    return lambda place, text: over_rest(place, path, body(text))


DOORS: Mapping[str, tuple[str, Door]] = {
    "completions": (
        "slow",
        rest("/v1/completions", lambda text: {"model": "slow", "prompt": text, **MOST}),
    ),
    "chat": (
        "slow",
        rest(
            "/v1/chat/completions",
            lambda text: {"model": "slow", "messages": [{"role": "user", "content": text}], **MOST},
        ),
    ),
    "embeddings": (
        "words",
        rest("/v1/embeddings", lambda text: {"model": "words", "input": [text]}),
    ),
    "generate": (
        "slow",
        rest("/v2/models/slow/generate", lambda text: {"text": text, "parameters": MOST}),
    ),
    "ModelInfer": ("slow", over_grpc),
}


@pytest.mark.parametrize("door", DOORS)
async def test_a_text_that_takes_too_much_is_refused_and_others_are_answered(
    place: Place, door: str
) -> None:
    model, asked = DOORS[door]
    text, why = (SHORT, "retry-limit") if model == "words" else (LONG, TOO_LONG)
    refused = asyncio.ensure_future(asked(place, text))
    live = await ask(place.http, "GET", "/v2/health/live", ("Authorization", f"Bearer {GOOD}"))
    good = [await place.good(model) for model in ("plain", "slow")]

    status, told = await refused

    assert live.status == 200
    assert good == [SCRIPT] * 2
    assert status in ("400", "StatusCode.INVALID_ARGUMENT")
    assert f"model '{model}': its tokenizer makes no tokens of the text: " in told
    # Which of its ends comes first is a matter of how quick the machine is.
    assert why in told or "seconds of the processor" in told


async def test_a_caller_with_many_such_texts_keeps_no_other_waiting(place: Place) -> None:
    """The other one waits for what has begun, and not for all that came before."""
    count = 8
    ended: list[str] = []

    async def hostile(number: int) -> None:
        status, _ = await DOORS["completions"][1](place, f"{LONG}{number}")
        ended.append(status)

    tasks = [asyncio.ensure_future(hostile(number)) for number in range(count)]
    async with asyncio.timeout(60):
        while not ended:
            await asyncio.sleep(0.001)
    good = await place.good("slow")
    before = len(ended)
    await asyncio.gather(*tasks)

    assert good == SCRIPT
    assert before < count // 2
    assert ended == ["400"] * count
