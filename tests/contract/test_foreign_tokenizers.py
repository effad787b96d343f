"""Texts that a tokenizer would process for hours, over each protocol, next to other callers."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from support import scripted_language, tiny_embedding
from support.crowds import beside_a_crowd
from support.hard_templates import ATTACKS
from support.http import Answer, ask
from support.server import RunningServer, serving
from tritonclient.utils import InferenceServerException

from xlaserve.language import tokenizing
from xlaserve.language.limited import Limited, Limits
from xlaserve.serving.access.tokens import digest_of, new_token

pytestmark = pytest.mark.asyncio(loop_scope="module")

BACKTRACKING, PANICKING = "(?:a|b)+(?:a|b)+[cx]", "(a+)+[bx]"
"""The first pattern is slow on any text, the second on one match, where the library panics."""
LONG, SHORT = "ab" * 700, "a" * 60
TOO_LONG = "it exceeds its limits of 0.2 CPU seconds and 67108864 bytes of memory"
HOSTILE, GOOD, OPERATOR = new_token(), new_token(), new_token()
SCRIPT = "well"
MOST = {"max_tokens": 4, "temperature": 0}
TEMPLATES = {"nested loops": "looping", "a gigabyte in pieces": "writing", "half a pair": "halving"}
"""Template attacks, and the model that has each one."""


@dataclass(frozen=True)
class Place:
    server: RunningServer
    nameless: RunningServer
    """A second server with the same models, whose callers are anonymous."""

    async def post(self, path: str, body: Any, token: str = HOSTILE) -> Answer:
        headers = ("Authorization", f"Bearer {token}")
        return await ask(self.http, "POST", path, headers, body=json.dumps(body).encode())

    @property
    def http(self) -> str:
        assert self.server.http is not None
        return self.server.http

    async def good(self, model: str) -> str:
        """Return another caller's answer from a model."""
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
    for name, (template, _) in ATTACKS.items():
        if name in TEMPLATES:
            shutil.copytree(models / "plain", models / TEMPLATES[name])
            written = json.dumps({"eos_token": "</s>", "chat_template": template})
            (models / TEMPLATES[name] / "1" / "tokenizer_config.json").write_text(written)
    make_slow(models / "slow" / "1" / "tokenizer.json", BACKTRACKING)
    make_slow(models / "words" / "1" / "tokenizer.json", PANICKING)
    may = {"allow": ["infer", "metadata", "health"]}
    callers = {"hostile": HOSTILE, "good": GOOD}
    rules = [{"name": n, "token": digest_of(token), **may} for n, token in callers.items()]
    rules.append({"name": "operator", "token": digest_of(OPERATOR), "allow": ["manage"]})
    (folder / "rules.json").write_text(json.dumps({"caller": rules}))
    running = serving(
        folder,
        models,
        load_model=("plain", "slow", *TEMPLATES.values()),
        http_endpoint="port:0",
        tokenizer_seconds=0.2,
        template_seconds=0.3,
        text_process_bytes=64 << 20,
        access_rules=str(folder / "rules.json"),
    )
    with pytest.MonkeyPatch.context() as changed:
        nameless = serving(
            folder / "nameless",
            models,
            load_model=("slow",),
            http_endpoint="port:0",
            tokenizer_seconds=0.2,
        )
        async with running as server, nameless as other:
            # The library's limit counts steps: allow enough time to reach it.
            changed.setattr(tokenizing, "Limited", patient)
            async with triton.InferenceServerClient(server.url) as client:
                await client.load_model("words", headers={"authorization": f"Bearer {OPERATOR}"})
            yield Place(server, other)


def patient(program: Sequence[str], limits: Limits, *given: Any, **named: Any) -> Limited:
    """Return a process with a timeout of a minute per text."""
    return Limited(program, replace(limits, cpu_seconds=60), *given, **named)


def make_slow(path: Path, regex: str) -> None:
    """Give a tokenizer a backtracking regular expression."""
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
    assert f"model '{model}': its tokenizer failed on the text: " in told
    assert why in told


@pytest.mark.parametrize("name", TEMPLATES)
async def test_a_template_that_takes_too_much_fails_its_chats_and_others_are_answered(
    place: Place, name: str
) -> None:
    """The template's author is not the caller, so the status is 500 rather than 400."""
    body = {"model": TEMPLATES[name], "messages": [{"role": "user", "content": "a0"}], **MOST}
    failed = asyncio.ensure_future(over_rest(place, "/v1/chat/completions", body))
    live = await ask(place.http, "GET", "/v2/health/live", ("Authorization", f"Bearer {GOOD}"))
    good = await place.good("plain")

    status, told = await failed

    assert live.status == 200
    assert good == SCRIPT
    assert status == "500"
    assert f"model '{TEMPLATES[name]}': its chat template failed: " in told
    assert ATTACKS[name][1] in told


async def test_a_caller_with_many_such_texts_keeps_no_other_waiting(place: Place) -> None:
    count = 8

    async def hostile(number: int) -> str:
        return (await DOORS["completions"][1](place, f"{LONG}{number}"))[0]

    found = await beside_a_crowd(hostile, partial(place.good, "slow"), count)

    assert found.good == SCRIPT
    assert found.before < count // 2
    assert found.ended == ["400"] * count


async def test_callers_without_names_take_turns_by_their_hosts(place: Place) -> None:
    count = 8

    async def asked(host: str, prompt: str) -> tuple[int, str]:
        connector = aiohttp.TCPConnector(local_addr=(host, 0))
        body = {"model": "slow", "prompt": prompt, **MOST}
        url = f"http://{place.nameless.http}/v1/completions"
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post(url, json=body) as answer,
        ):
            return answer.status, await answer.text()

    async def hostile(number: int) -> str:
        return str((await asked("127.0.0.1", f"{LONG}{number}"))[0])

    found = await beside_a_crowd(hostile, partial(asked, "127.0.0.2", "a0"), count)

    status, text = cast(tuple[int, str], found.good)
    assert (200, SCRIPT) == (status, json.loads(text)["choices"][0]["text"])
    assert found.before < count // 2
    assert found.ended == ["400"] * count
