"""Language models with a tokenizer: text in and out, over gRPC and `generate`."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support import tiny_language
from support import tokenizers as small
from support.events import EventReader
from support.http import ask, connect, message
from support.server import RunningServer, Serve
from support.tiny_language import greedy
from tritonclient.utils import InferenceServerException

from xlaserve.language.text_limits import ENCODED_TIMES

CONFIG = "\n".join(
    f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
    for name, value in {"slots": 4, "windows": 64, "chunk": 8}.items()
)
PROMPT = "hello there"
TOKENS = [len(small.OF_LETTERS) + small.LETTERS.index(letter) for letter in PROMPT]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("models") / "story"
    tiny_language.export(model / "1")
    small.save(model / "1", small.letters())
    (model / "config.pbtxt").write_text(CONFIG)
    return model.parent


@pytest.fixture
async def server(serve: Serve, exported: Path) -> AsyncIterator[RunningServer]:
    async with serve(exported, load_model=("story",), http_endpoint="port:0") as running:
        yield running


def text_of(tokens: list[int]) -> str:
    known = [*("" for _ in small.OF_LETTERS), *small.LETTERS]
    return "".join(known[token] for token in tokens)


def tensor(name: str, value: Any) -> Any:
    array = np.array(value, object if name == "text" else np.int32)
    found = triton.InferInput(name, list(array.shape), "BYTES" if name == "text" else "INT32")
    found.set_data_from_numpy(array)
    return found


async def answered(
    server: RunningServer, inputs: Mapping[str, Any], outputs: tuple[str, ...] = (), **given: Any
) -> Any:
    """Return tokens, text pieces, and the parameters of the last answer."""
    request = {
        "model_name": "story",
        "inputs": [tensor(*one) for one in inputs.items()],
        "outputs": [triton.InferRequestedOutput(name) for name in outputs] or None,
        "parameters": given,
    }

    async def sent() -> AsyncIterator[dict[str, Any]]:
        yield request

    tokens: list[int] = []
    pieces: list[str] = []
    last: Any = None
    async with triton.InferenceServerClient(server.url) as client:
        answers: Any = client.stream_infer(sent())
        async for result, error in answers:
            if error is not None:
                raise error
            tokens.append(int(result.as_numpy("token")[0]))
            text = result.as_numpy("text")
            pieces += [] if text is None else [text[0].decode()]
            last = result.get_response().parameters
    return tokens, pieces, last


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


async def posted(server: RunningServer, verb: str, body: Any) -> Any:
    assert server.http is not None
    path, written = f"/v2/models/story/{verb}", json.dumps(body).encode()
    return json.loads((await ask(server.http, "POST", path, body=written)).body)


async def test_a_prompt_is_text_or_tokens_and_answers_have_both(server: RunningServer) -> None:
    expected = greedy(TOKENS, 12)
    asked: dict[str, Any] = {"max_tokens": 12}
    by_text = await answered(server, {"text": [PROMPT.encode()]}, **asked)
    by_tokens = await answered(server, {"tokens": TOKENS}, **asked)
    tokens_only = await answered(server, {"tokens": TOKENS}, ("token",), **asked)

    assert expected == by_text[0] == by_tokens[0] == tokens_only[0]
    assert text_of(expected) == "".join(by_text[1]) == "".join(by_tokens[1])
    assert [] == tokens_only[1]
    assert len(TOKENS) == by_text[2]["prompt_tokens"].int64_param


LONG = b"a" * 64 * tiny_language.LENGTH


async def test_a_text_that_there_is_no_memory_for_is_refused(serve: Serve, exported: Path) -> None:
    """Other requests hold most of the memory: shorter texts and token prompts are still
    answered.
    """
    given: dict[str, Any] = {"load_model": ("story",), "max_held_bytes": 4 << 20}
    async with serve(exported, **given) as server:
        ledger = server.application.ledger
        other = ledger.open()
        other.hold(3 << 20)
        with pytest.raises(InferenceServerException, match="the tokens of a prompt"):
            await answered(server, {"text": [LONG]})
        short = await answered(server, {"text": [PROMPT.encode()]}, max_tokens=3)
        of_tokens = await answered(server, {"tokens": TOKENS}, max_tokens=3)
        other.close()
        with pytest.raises(InferenceServerException, match="expected 1 to 64 tokens"):
            await answered(server, {"text": [LONG]})
        await until(lambda: not ledger.held)

    assert greedy(TOKENS, 3) == short[0] == of_tokens[0]


async def test_texts_are_held_until_they_are_tokens(server: RunningServer) -> None:
    """Whether they are answered, rejected, or abandoned while queued."""
    ledger, release = server.application.ledger, threading.Event()
    _, instance = server.application.registry.resolve("story")
    station: Any = instance.station
    station.copies.model._prompts.thread.submit("somebody", release.wait)
    try:
        good, long, left = (
            asyncio.ensure_future(answered(server, {"text": [text]}, max_tokens=2))
            for text in (PROMPT.encode(), LONG, LONG)
        )
        await until(lambda: ledger.held > ENCODED_TIMES * 2 * len(LONG))
        left.cancel()
        await until(lambda: ledger.held < ENCODED_TIMES * 2 * len(LONG))
        held_by_others = ledger.held
    finally:
        release.set()
    with pytest.raises(InferenceServerException, match="expected 1 to 64 tokens"):
        await long
    answer = await good
    await until(lambda: not ledger.held)

    assert held_by_others >= ENCODED_TIMES * (len(LONG) + len(PROMPT))
    assert greedy(TOKENS, 2) == answer[0]


@pytest.mark.slow
async def test_special_tokens_of_a_prompt_are_text(server: RunningServer) -> None:
    """A client cannot end a turn of the conversation by writing the special token's text."""
    written = [f"a{small.STOP}b".encode()]
    _, _, last = await answered(server, {"text": written}, max_tokens=1)

    assert len(f"a{small.STOP}b") >= last["prompt_tokens"].int64_param > 3


@pytest.mark.slow
@pytest.mark.parametrize("as_list", [False, True])
async def test_a_stop_string_ends_the_answer(server: RunningServer, as_list: bool) -> None:
    """It appears in no text, however tokens split it, and the slot is freed."""
    whole = greedy(TOKENS, 30)
    text = text_of(whole)
    stop = text[4:7]
    given = json.dumps(["never", stop]) if as_list else stop
    tokens, pieces, last = await answered(
        server, {"text": [PROMPT.encode()]}, max_tokens=30, stop=given
    )

    assert text[: text.index(stop)] == "".join(pieces)
    assert whole[: len(tokens)] == tokens
    assert len(tokens) < len(whole)
    assert ("stop", stop) == (
        last["finish_reason"].string_param,
        last["stop_string"].string_param,
    )


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, "input 'text': expected either it or 'tokens', got neither"),
    ({"text": [b"a"], "tokens": [7]}, {}, "expected either it or 'tokens', got both"),
    ({"text": [b"\xff"]}, {}, "input 'text': expected text in UTF-8, got other bytes"),
    ({"text": [b""]}, {}, "input 'text': expected 1 to 64 tokens"),
    ({"text": [b"a" * 65]}, {}, "input 'text': expected 1 to 64 tokens.*got 65"),
    ({"text": [b"a" * 64 * 65]}, {}, "input 'text': expected at most 4096 characters"),
    ({"text": [b"a", b"b"]}, {}, r"input 'text': expected BYTES\[1\], got BYTES\[2\]"),
    ({"text": [b"a"]}, {"stop": ""}, "parameter 'stop': expected strings of 1 to"),
    ({"text": [b"a"]}, {"stop": "[1]"}, "parameter 'stop': expected a string, or a list"),
    ({"text": [b"a"]}, {"stop": 3}, "parameter 'stop': expected a string, or a list"),
    (
        {"text": [b"a"]},
        {"stop": json.dumps(["a"] * 300_000)},
        "parameter 'stop': expected at most 16 strings of 1024 characters, got 1500000 characters",
    ),
    ({"text": [b"a"]}, {"top_p": 2.0}, "parameter 'top_p'"),
]


async def test_prompts_that_are_none_are_refused(server: RunningServer) -> None:
    for inputs, given, text in REFUSED:
        with pytest.raises(InferenceServerException, match=text):
            await answered(server, inputs, **given)


async def test_the_metadata_says_what_may_be_left_out(server: RunningServer) -> None:
    async with triton.InferenceServerClient(server.url) as client:
        found: Any = await client.get_model_metadata("story")

    assert [("tokens", "INT32"), ("text", "BYTES")] == [
        (one.name, one.datatype) for one in found.inputs
    ]
    last = found.outputs[-1]
    assert ("text", "BYTES", [1]) == (
        last.name,
        last.datatype,
        list(last.shape),
    )


# --- generate ----------------------------------------------------------------------------------


async def test_generate_takes_text_and_gives_all_of_it(server: RunningServer) -> None:
    body = {"text_input": PROMPT, "parameters": {"max_tokens": 12}}

    found = await posted(server, "generate", body)

    assert (text_of(greedy(TOKENS, 12)), greedy(TOKENS, 12), "length", len(TOKENS)) == (
        found["text_output"],
        found["tokens"],
        found["finish_reason"],
        found["prompt_tokens"],
    )


@pytest.mark.slow
async def test_generate_obeys_a_list_of_stop_strings(server: RunningServer) -> None:
    text = text_of(greedy(TOKENS, 30))
    body = {"text_input": PROMPT, "max_tokens": 30, "stop": ["never", text[4:7]]}
    found = await posted(server, "generate", body)

    assert (text[: text.index(text[4:7])], text[4:7]) == (
        found["text_output"],
        found["stop_string"],
    )


async def test_generate_stream_gives_the_text_of_each_token(server: RunningServer) -> None:
    assert server.http is not None
    body = json.dumps({"text_input": PROMPT, "max_tokens": 5}).encode()
    async with connect(server.http) as client:
        client.writer.write(message("POST", "/v2/models/story/generate_stream", body=body))
        reader = EventReader(client)
        await reader.head()
        events = [event for _, event in await reader.events()]

    assert text_of(greedy(TOKENS, 5)) == "".join(event["text_output"] for event in events)
    assert greedy(TOKENS, 5) == [event["token"] for event in events]


@pytest.mark.slow
async def test_prompts_of_text_beside_one_another_are_not_mixed(server: RunningServer) -> None:
    words = ["a dog", "the cat", "x", "hello there", "no", "yes it is"]
    asked = [{"text": [word.encode()]} for word in words]
    alone = [(await answered(server, one, max_tokens=8))[0] for one in asked]
    together = await asyncio.gather(*(answered(server, one, max_tokens=8) for one in asked))

    assert alone == [found[0] for found in together]


# --- loads -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("1/tokenizer.json", "{}", "tokenizer.json is not valid.*may be false"),
        ("config.pbtxt", 'parameters { key: "text" value { string_value: "x" } }', "true or false"),
    ],
)
async def test_a_tokenizer_that_cannot_be_read_fails_the_load(
    serve: Serve, exported: Path, tmp_path: Path, name: str, content: str, text: str
) -> None:
    model = shutil.copytree(exported / "story", tmp_path / "models" / "story")
    (model / name).write_text(content)
    if name != "config.pbtxt":
        with (model / "config.pbtxt").open("a") as file:
            file.write('\nparameters { key: "text" value { string_value: "true" } }')
    async with serve(model.parent, model_control_mode="explicit") as running:
        async with triton.InferenceServerClient(running.url) as client:
            with pytest.raises(InferenceServerException, match=text):
                await client.load_model("story")
