"""OpenAI's endpoints, with OpenAI's client and raw HTTP."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import pytest_asyncio
from support import tiny_chat, tiny_language
from support.http import Answer, ask, connect, message
from support.server import RunningServer, serving
from support.tiny_chat import text_of, tokens_of

from xlaserve.language.text import LanguageText
from xlaserve.openai import generating
from xlaserve.openai.calls import ChoiceCall
from xlaserve.serving.access.tokens import digest_of, new_token

pytestmark = pytest.mark.asyncio(loop_scope="module")

OWNER, STRANGER, HURRIED = new_token(), new_token(), new_token()
LETTERS_ONLY = {str(token): -100 for token in range(len(tiny_chat.SPECIAL))}
"""A bias that keeps special tokens out of answers."""
CHAT = [{"role": "user", "content": "hello"}]
MOST_REQUESTS = 16


@dataclass(frozen=True)
class Place:
    server: RunningServer
    client: openai.AsyncOpenAI

    @property
    def http(self) -> str:
        assert self.server.http is not None
        return self.server.http

    async def post(self, path: str, body: Any, token: str = OWNER) -> Answer:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = ("Authorization", f"Bearer {token}")
        return await ask(self.http, "POST", path, headers, body=text)

    async def chat(self, **fields: Any) -> Answer:
        asked = {"model": "story", "messages": CHAT, "max_tokens": 3, **fields}
        return await self.post("/v1/chat/completions", asked)


def rules() -> str:
    may = {"allow": ["infer", "metadata"]}
    return json.dumps(
        {
            "caller": [
                {
                    "name": "owner",
                    "token": digest_of(OWNER),
                    "allow": [*may["allow"], "page"],
                },
                {"name": "stranger", "token": digest_of(STRANGER), "models": ["other"], **may},
                {
                    "name": "hurried",
                    "token": digest_of(HURRIED),
                    "requests_per_second": 0.01,
                    "burst": 1,
                    **may,
                },
            ]
        }
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="place")
async def _place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("openai")
    tiny_chat.export(folder / "models" / "story")
    (folder / "rules.json").write_text(rules())
    running = serving(
        folder,
        folder / "models",
        load_model=("story",),
        http_endpoint="port:0",
        access_rules=str(folder / "rules.json"),
        max_requests_per_model=MOST_REQUESTS,
    )
    async with running as server, client_of(server.http) as client:
        yield Place(server, client)


def client_of(http: str | None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{http}/v1", api_key=OWNER, max_retries=0)


async def until_idle(server: RunningServer) -> None:
    application = server.application
    async with asyncio.timeout(60):
        while (
            application.registry.requests
            or application.ledger.held
            or application.registry.resolve("story")[1].users
        ):
            await asyncio.sleep(0.001)


async def biased(place: Place, **fields: Any) -> Any:
    """Complete `abc` greedily with letters only."""
    asked: dict[str, Any] = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
    return await place.client.completions.create(
        model="story", **{"logit_bias": LETTERS_ONLY, **asked, **fields}
    )


# --- Models --------------------------------------------------------------------------------------


async def test_language_models_are_listed(place: Place) -> None:
    listed = [model async for model in place.client.models.list()]
    one = await place.client.models.retrieve("story")

    assert [one] == listed
    assert ("story", "model", "xlaserve") == (one.id, one.object, one.owned_by)
    directory = place.server.application.registry.resolve("story")[1].info.generation
    assert directory is not None
    assert one.created == directory.written_at > 0
    assert tiny_language.LENGTH == one.model_dump()["max_model_len"]


@pytest.mark.parametrize(("size", "is_long"), [(8, False), (1 << 20, True)])
async def test_long_prompts_are_checked_off_the_loop(
    place: Place, monkeypatch: pytest.MonkeyPatch, size: int, is_long: bool
) -> None:
    """Detected by the memory that their token ids take; here the threshold is small."""
    check, threads = generating._tokens, list[threading.Thread]()

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return check(*given)

    monkeypatch.setattr(generating, "_tokens", noted)
    monkeypatch.setattr(generating, "_ID_BYTES", size)
    asked = {"model": "story", "prompt": tokens_of("abcdefg"), "max_tokens": 1}
    answer = await place.post("/v1/completions", asked)

    assert 200 == answer.status
    assert [is_long] == [one is not threading.current_thread() for one in threads]


async def test_a_hidden_model_is_answered_as_one_that_is_not_there(place: Place) -> None:
    found = []
    for name in ("story", "nobody"):
        body = {"model": name, "messages": CHAT}
        answers = [
            await ask(
                place.http, "GET", f"/v1/models/{name}", ("Authorization", f"Bearer {STRANGER}")
            ),
            await place.post("/v1/chat/completions", body, STRANGER),
        ]
        found.append([(one.status, one.body.replace(name.encode(), b"")) for one in answers])
    listed = await ask(place.http, "GET", "/v1/models", ("Authorization", f"Bearer {STRANGER}"))

    assert found[0] == found[1]
    assert [404, 404] == [status for status, _ in found[0]]
    assert b'"code":"model_not_found"' in found[0][0][1]
    assert [] == listed.json["data"]


# --- Completions ---------------------------------------------------------------------------------


async def test_a_completion_is_what_the_model_computes(place: Place) -> None:
    greedy = tiny_language.greedy(tokens_of("abc"), 6)
    whole = await place.client.completions.create(
        model="story", prompt="abc", max_tokens=6, temperature=0, seed=-7
    )
    other = await place.post(
        "/openai/v1/completions",
        {"model": "story", "prompt": tokens_of("abc"), "max_tokens": 6, "temperature": 0},
    )

    choice = whole.choices[0]
    assert (text_of(greedy), "length") == (choice.text, choice.finish_reason)
    assert choice.text == other.json["choices"][0]["text"]
    assert whole.usage is not None
    assert (3, 6, 9) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
        whole.usage.total_tokens,
    )
    assert whole.id.startswith("cmpl-")
    assert "system_fingerprint" not in other.json


async def test_every_prompt_has_its_choices_in_order(place: Place) -> None:
    """As texts and token ids; a choice has the same tokens alone and with others."""
    texts = ["abc", "uvw"]
    alone = [(await biased(place, prompt=text)).choices[0].text for text in texts]
    together = await biased(place, prompt=texts, n=2)
    as_tokens = await biased(place, prompt=[tokens_of(text) for text in texts])

    assert [alone[0], alone[0], alone[1], alone[1]] == [one.text for one in together.choices]
    assert [0, 1, 2, 3] == [one.index for one in together.choices]
    assert alone == [one.text for one in as_tokens.choices]
    assert (6, 32) == (together.usage.prompt_tokens, together.usage.completion_tokens)


async def test_tokens_that_were_kept_of_another_prompt_are_told(place: Place) -> None:
    """The last token is always computed, and tokens of one choice are not cached for others."""
    prompt = "Prompt tokens reused from the prefix cache since the last load".replace(" ", "")
    first = await biased(place, prompt=prompt, max_tokens=1, n=2)
    again = await biased(place, prompt=prompt, max_tokens=1)

    assert 0 == first.usage.prompt_tokens_details.cached_tokens
    assert len(prompt) - 1 == again.usage.prompt_tokens_details.cached_tokens


async def test_a_stop_text_ends_an_answer_across_tokens(place: Place) -> None:
    """It does not count as a failure of the model."""
    whole = (await biased(place, max_tokens=12)).choices[0].text
    stop = whole[3:6]
    statistics = place.server.application.registry.resolve("story")[0].statistics
    failed = statistics.fail_count
    found = await biased(place, max_tokens=12, stop=["nowhere", stop])
    streamed = await biased(place, max_tokens=12, stop=stop, stream=True)
    pieces = [chunk.choices[0] async for chunk in streamed]
    await until_idle(place.server)

    expected = whole[: whole.index(stop)]
    assert (expected, "stop") == (found.choices[0].text, found.choices[0].finish_reason)
    assert expected == "".join(piece.text for piece in pieces)
    assert "stop" == pieces[-1].finish_reason
    assert failed == statistics.fail_count


async def test_a_stop_token_is_no_text(place: Place) -> None:
    forced = await biased(place, logit_bias={"5": 100})
    named = await biased(
        place, logit_bias={"9": 100}, extra_body={"stop_token_ids": [9], "min_tokens": 2}
    )
    unheeded = await biased(place, logit_bias={"5": 100}, extra_body={"ignore_eos": True})

    found = [(one.choices[0], one.usage.completion_tokens) for one in (forced, named, unheeded)]
    assert [("", "stop", 1), (text_of([9, 9]), "stop", 3), ("", "length", 8)] == [
        (choice.text, choice.finish_reason, tokens) for choice, tokens in found
    ]


async def test_a_seed_repeats_its_choices(place: Place) -> None:
    """Choice `i` uses `seed + i`, so choices differ."""
    fields: dict[str, Any] = {"temperature": 1.5, "max_tokens": 12}
    three = [one.text for one in (await biased(place, seed=5, n=3, **fields)).choices]
    singles = [(await biased(place, seed=seed, **fields)).choices[0].text for seed in (5, 6, 7, 5)]

    assert [*three, three[0]] == singles
    assert 3 == len(set(three))


async def test_log_probabilities_come_with_each_token(place: Place) -> None:
    found = (await biased(place, logprobs=2, max_tokens=4)).choices[0]
    chat = await place.client.chat.completions.create(
        model="story",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4,
        temperature=0,
        logit_bias=LETTERS_ONLY,
        logprobs=True,
        top_logprobs=3,
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None

    assert found.text == "".join(found.logprobs.tokens)
    assert [0, 1, 2, 3] == found.logprobs.text_offset
    assert all(-30 < one < 0 for one in found.logprobs.token_logprobs)
    assert 4 == len(found.logprobs.top_logprobs)
    assert chat.choices[0].message.content == "".join(one.token for one in content)
    for one in content:
        assert list(one.token.encode()) == one.bytes
        assert 3 == len(one.top_logprobs)
        assert one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob >= one.logprob - 30


# --- Chat ----------------------------------------------------------------------------------------


async def test_a_chat_is_streamed_as_it_is_answered(place: Place) -> None:
    """With the model's template, which gets `developer` messages and text parts."""
    messages: list[Any] = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    fields: dict[str, Any] = {
        "model": "story",
        "messages": messages,
        "max_completion_tokens": 9,
        "temperature": 0,
        "logit_bias": LETTERS_ONLY,
    }
    whole = await place.client.chat.completions.create(**fields)
    stream = await place.client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    prompt = [1, 4, *tokens_of("be"), 2, *tokens_of("a\nb"), 3]
    tokens = await biased(place, prompt=prompt, max_tokens=9)

    text = whole.choices[0].message.content
    assert tokens.choices[0].text == text
    assert text == "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "assistant" == chunks[0].choices[0].delta.role
    assert "length" == chunks[-2].choices[0].finish_reason
    assert [] == chunks[-1].choices
    streamed = chunks[-1].usage
    # The same prompt again: most of it was cached.
    assert streamed is not None
    assert whole.usage is not None
    streamed.prompt_tokens_details = whole.usage.prompt_tokens_details
    assert whole.usage == streamed
    assert len(prompt) == whole.usage.prompt_tokens
    assert 1 == len({chunk.id for chunk in chunks})
    assert whole.id.startswith("chatcmpl-")


async def test_events_are_those_of_openai(place: Place) -> None:
    body = json.dumps({"model": "story", "messages": CHAT, "n": 2, "stream": True, "max_tokens": 4})
    async with connect(place.http) as client:
        bearer = ("Authorization", f"Bearer {OWNER}")
        await client.send(
            message(
                "POST", "/v1/chat/completions", bearer, ("Connection", "close"), body=body.encode()
            )
        )
        raw = await client.ended()
    head, _, rest = raw.partition(b"\r\n\r\n")
    lines = [line for line in rest.split(b"\n") if line.startswith(b"data: ")]

    assert head.startswith(b"HTTP/1.1 200")
    assert b"text/event-stream" in head
    assert b"data: [DONE]" == lines[-1]
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert all("usage" not in chunk for chunk in chunks)
    ends = [c["choices"][0] for c in chunks if c["choices"][0]["finish_reason"]]
    assert [0, 1] == sorted(one["index"] for one in ends)
    assert all({} == one["delta"] or one["delta"]["content"] for one in ends)


async def test_the_synchronous_client_is_served(place: Place) -> None:
    def asked() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"http://{place.http}/openai/v1", api_key=OWNER) as client:
            fields: dict[str, Any] = {"model": "story", "prompt": "abc", "temperature": 0}
            whole = client.completions.create(**fields)
            parts = client.completions.create(**fields, stream=True)
            return whole.choices[0].text, "".join(part.choices[0].text for part in parts)

    whole, streamed = await asyncio.to_thread(asked)

    assert whole == streamed


# --- Rejected requests ---------------------------------------------------------------------------

PART = {"type": "image_url", "image_url": {"url": "data:"}}
REFUSED: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"unheard": 1}, "unheard", "unknown_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", None),
    ({"tools": [{"type": "function"}]}, "tools[0].function", None),
    ({"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
    ({"temperature": -1}, "temperature", None),
    ({"temperature": "hot"}, "temperature", None),
    ({"top_p": 1.5}, "top_p", None),
    ({"n": 0}, "n", None),
    ({"n": 129}, "n", None),
    ({"seed": 2**63}, "seed", None),
    ({"stop": ["a"] * 5}, "stop", None),
    ({"stop": [""]}, "stop[0]", None),
    ({"logit_bias": {"a": 1}}, "logit_bias", None),
    ({"logit_bias": {"7:1,8": 1}}, "logit_bias", None),
    ({"logit_bias": {"99": 1}}, "logit_bias", None),
    ({"logit_bias": {"7": 200}}, "logit_bias[...]", None),
    ({"stop_token_ids": [32]}, "stop_token_ids", None),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"top_logprobs": 2}, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", None),
    ({"messages": []}, "messages", None),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", None),
    ({"messages": [{"role": "user"}]}, "messages[0].content", None),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id", None),
    ({"messages": [{"role": "user", "content": [PART]}]}, "messages[0].content[0].type", None),
    (
        {"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]},
        "messages[0].tool_calls[0]",
        None,
    ),
    ({"messages": [{"role": "user", "content": "a" * 62}]}, "messages", "context_length_exceeded"),
    (
        {"messages": [{"role": "user", "content": "a" * 4097}]},
        "messages",
        "context_length_exceeded",
    ),
    ({"model": 3}, "model", None),
]


async def test_what_is_refused_names_its_field(place: Place) -> None:
    for fields, param, code in REFUSED:
        answer = await place.chat(**fields)

        assert 400 == answer.status, fields
        told = answer.json["error"]
        assert {"message", "type", "param", "code"} == set(told)
        assert ("invalid_request_error", param, code) == (
            told["type"],
            told["param"],
            told["code"],
        ), (fields, told)
    for body in (b"", b"[]", b'{"model": "story"', b"\xff", b'{"a":' * 200 + b"1" + b"}" * 200):
        answer = await place.post("/v1/completions", body)
        assert (400, "invalid_request_error") == (answer.status, answer.json["error"]["type"])
    await until_idle(place.server)


PROMPTS: list[tuple[Any, str]] = [
    ([], "at least one string or token"),
    ("", "1 to 64 tokens"),
    ([1, "a"], "only strings, only token ids"),
    (["a"] * 129, "max_choices"),
    ("a" * 4097, "at most 4096 characters"),
    ([32], "token ids of 0 to 31"),
    ([-1], ">= 0"),
    ([[1], []], "1 to 64 tokens"),
    ([2**40], "<= 2147483647"),
    (None, "got null"),
    ({"a": 1}, "expected"),
]


async def test_a_prompt_that_is_none_is_refused(place: Place) -> None:
    for prompt, expected in PROMPTS:
        answer = await place.post("/v1/completions", {"model": "story", "prompt": prompt})

        assert 400 == answer.status, prompt
        assert expected in answer.error, prompt
        assert answer.json["error"]["param"] in ("prompt", "prompt[0]", "n")


async def test_what_asks_for_nothing_is_taken(place: Place) -> None:
    answer = await place.chat(
        user="me",
        store=True,
        metadata={"a": "b"},
        safety_identifier="s",
        prompt_cache_key="k",
        parallel_tool_calls=False,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        service_tier="auto",
        modalities=["text"],
        reasoning_effort=None,
        temperature=None,
        n=None,
        stop=None,
        stream=None,
        stream_options=None,
        messages=[{**CHAT[0], "refusal": None, "tool_calls": [], "annotations": []}],
    )

    assert 200 == answer.status, answer.body


async def test_errors_before_a_handler_have_the_shape(place: Place) -> None:
    """Unknown callers, unknown paths, wrong methods, and web pages."""
    bearer = ("Authorization", f"Bearer {OWNER}")
    page = ("Sec-Fetch-Site", "cross-site")
    found = [
        await ask(place.http, "POST", "/v1/completions", body=b"{}"),
        await ask(place.http, "GET", "/v1/nowhere", bearer),
        await ask(place.http, "GET", "http://localhost/openai/v1/completions?a=/", bearer),
        await ask(place.http, "POST", "/v1/completions", bearer, page, body=b"{}"),
        await ask(place.http, "GET", "/v1/models", ("Authorization", "Bearer wrong")),
    ]

    assert [401, 404, 405, 403, 401] == [one.status for one in found]
    assert all({"message", "type", "param", "code"} == set(one.json["error"]) for one in found)
    assert "invalid_api_key" == found[0].json["error"]["code"]
    assert "Bearer" == found[0].headers["www-authenticate"]
    assert "OPTIONS, POST" == found[2].headers["allow"]


async def test_who_asks_too_much_is_told_when_to_come_again(place: Place) -> None:
    """By a quota, and by the model's request limit, for which each choice counts."""
    body = {"model": "story", "messages": CHAT, "max_tokens": 1}
    first = await place.post("/v1/chat/completions", body, HURRIED)
    second = await place.post("/v1/chat/completions", body, HURRIED)
    full = await place.chat(n=MOST_REQUESTS + 1)
    await until_idle(place.server)

    assert [200, 429, 429] == [first.status, second.status, full.status]
    assert int(second.headers["retry-after"]) > 1
    assert "1" == full.headers["retry-after"]
    assert "rate_limit_exceeded" == full.json["error"]["code"] == second.json["error"]["code"]
    assert "max_requests_per_model" in full.error


# --- Cancellation and errors ---------------------------------------------------------------------


async def test_a_client_that_leaves_frees_its_slots(place: Place) -> None:
    stream = await place.client.chat.completions.create(
        model="story",
        messages=[{"role": "user", "content": "a"}],
        n=3,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    await anext(stream.__aiter__())
    await stream.close()
    await until_idle(place.server)

    assert 200 == (await place.chat()).status


async def test_a_client_that_leaves_ends_all_choices(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including choices that have sent nothing: the steps wait until all are cancelled."""
    runner: Any = place.server.application.registry.resolve("story")[1].runner
    step, cancel, may_go_on = runner._programs.step, ChoiceCall.cancel, threading.Event()
    steps: list[int] = []
    cancelled: set[int] = set()

    def held(*arguments: Any, **slots: Any) -> Any:
        steps.append(0)
        if len(steps) > 2:
            may_go_on.wait(30)
        return step(*arguments, **slots)

    def noted(call: ChoiceCall, reason: str) -> None:
        if call.parent is not None:
            cancelled.add(id(call))
        cancel(call, reason)

    monkeypatch.setattr(runner._programs, "step", held)
    monkeypatch.setattr(ChoiceCall, "cancel", noted)
    stream = await place.client.chat.completions.create(
        model="story", messages=[{"role": "user", "content": "a"}], n=3, stream=True
    )
    await anext(stream.__aiter__())
    await stream.close()
    try:
        async with asyncio.timeout(20):
            while len(cancelled) < 3:
                await asyncio.sleep(0.001)
    finally:
        may_go_on.set()
    await until_idle(place.server)


async def test_an_error_behind_the_first_chunk_is_an_event(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is not streamed gets an HTTP status."""
    _, instance = place.server.application.registry.resolve("story")
    runner: Any = instance.runner
    step, steps = runner._programs.step, [0]

    def failing(*arguments: Any, **slots: Any) -> Any:
        steps[0] += 1
        if steps[0] == 4:
            steps[0] = 0
            raise RuntimeError("the device is gone")
        return step(*arguments, **slots)

    monkeypatch.setattr(runner._programs, "step", failing)
    stream = await biased(place, max_tokens=9, stream=True)
    found: list[Any] = []

    async def read() -> None:
        async for chunk in stream:
            found.append(chunk)

    with pytest.raises(openai.APIError, match="a step failed: the device is gone"):
        await read()
    answer = await place.chat(max_tokens=9, ignore_eos=True)
    await until_idle(place.server)

    assert 3 == len(found)
    assert (500, "server_error") == (answer.status, answer.json["error"]["type"])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.parametrize(
    "body",
    [
        *(b"[}", b"{]", b'{"model": 1, }', b'{"model": 1} x', b'[1,"\\ud800"'),
        *(b'{"model":1,"a":"\xff"', b'{"model":1,"a":"\xff"}'),
    ],
)
async def test_what_is_no_json_is_refused_wherever_that_shows(
    place: Place, path: str, body: bytes
) -> None:
    """A wrong type is reported before the position where the text is truncated."""
    answer = await place.post(path, body)

    assert 400 == answer.status
    assert b"expected a body of JSON" in answer.body


async def test_the_event_loop_goes_on_while_a_short_prompt_is_encoded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are served while a regular expression takes seconds on a few characters."""
    begun, answered = threading.Event(), threading.Event()
    was_answered: list[bool] = []

    def encode(self: LanguageText, text: str) -> list[int]:
        begun.set()
        was_answered.append(answered.wait(30))
        return tokens_of(text)

    monkeypatch.setattr(LanguageText, "encode", encode)
    asked = {"model": "story", "prompt": "abc", "max_tokens": 1}
    held = asyncio.ensure_future(place.post("/v1/completions", asked))
    async with asyncio.timeout(60):
        while not begun.is_set():
            await asyncio.sleep(0.001)
        listed = await ask(place.http, "GET", "/v1/models", ("Authorization", f"Bearer {OWNER}"))
    answered.set()
    completed = await held

    assert [True] == was_answered
    assert (200, 200) == (listed.status, completed.status)
