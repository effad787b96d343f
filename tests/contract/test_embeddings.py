"""OpenAI embeddings, requested by OpenAI's client and by raw HTTP."""

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
from support import encoders, identity_models, tiny_embedding
from support.http import Answer, ask
from support.server import RunningServer, Serve, serving
from support.tiny_embedding import expected, tokens_of
from typer.testing import CliRunner

import encoder_references as references
from xlaserve.cli import application
from xlaserve.errors import LoadFailed
from xlaserve.language.tokenizing import Tokens
from xlaserve.serving.access.tokens import digest_of, new_token

pytestmark = pytest.mark.asyncio(loop_scope="module")

OWNER, STRANGER = new_token(), new_token()
MOST_INPUTS = 6


def rules() -> str:
    may = {"allow": ["infer", "metadata"]}
    owner = {"name": "owner", "token": digest_of(OWNER), **may}
    stranger = {"name": "stranger", "token": digest_of(STRANGER), "models": ["other"], **may}
    return json.dumps({"caller": [owner, stranger]})


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("embeddings")
    tiny_embedding.export(folder / "models" / "words", dimensions=[2, 4], pad=7)
    (folder / "rules.json").write_text(rules())
    running = serving(
        folder,
        folder / "models",
        load_model=("words",),
        http_endpoint="port:0",
        access_rules=str(folder / "rules.json"),
        max_embedding_inputs=MOST_INPUTS,
    )
    async with running as server:
        server.gather("words", 4)
        yield server


async def post(server: RunningServer, token: str = OWNER, **fields: Any) -> Answer:
    assert server.http is not None
    body = json.dumps({"model": "words", **fields}).encode()
    headers = ("Authorization", f"Bearer {token}")
    return await ask(server.http, "POST", "/v1/embeddings", headers, body=body)


def executions(server: RunningServer) -> tuple[int, int]:
    """Return the number of executions, and of the inferences in them."""
    version, _ = server.application.registry.resolve("words")
    found = version.statistics.totals()
    return found.execution_count, found.inference_count


async def until_idle(server: RunningServer) -> None:
    application = server.application
    async with asyncio.timeout(60):
        while (
            application.registry.requests
            or application.ledger.held
            or application.registry.resolve("words")[1].users
        ):
            await asyncio.sleep(0.001)


async def test_openais_client_is_given_the_embedding_of_each_text(server: RunningServer) -> None:
    texts = ["a", "abcdefg", "hello", "abc"]  # 2, 8, 6 and 4 tokens
    base = {"base_url": f"http://{server.http}/v1", "api_key": OWNER, "max_retries": 0}
    found = []
    async with openai.AsyncOpenAI(**base) as client:  # type: ignore[arg-type]
        for form in ({}, {"encoding_format": "float"}):
            found.append(await client.embeddings.create(model="words", input=texts, **form))  # type: ignore[arg-type]
        listed = [model async for model in client.models.list()]

    def alone() -> Any:
        with openai.OpenAI(**base) as client:  # type: ignore[arg-type]
            return client.embeddings.create(model="words", input="hello")

    one = await asyncio.to_thread(alone)

    for answer in found:
        assert [0, 1, 2, 3] == [row.index for row in answer.data]
        for text, row in zip(texts, answer.data, strict=True):
            np.testing.assert_allclose(row.embedding, expected(tokens_of(text)), rtol=1e-5)
        assert (20, 20) == (answer.usage.prompt_tokens, answer.usage.total_tokens)
        assert ("list", "words") == (answer.object, answer.model)
    assert found[0].data[2].embedding == one.data[0].embedding
    assert [("words", 8)] == [(one.id, one.model_dump()["max_model_len"]) for one in listed]
    await until_idle(server)


async def test_inputs_of_one_length_are_executed_together_also_with_those_of_others(
    server: RunningServer,
) -> None:
    before = executions(server)
    asked = [[9, 10], [11], [12, 13, 14], [15, 16, 17, 18, 19]]
    answers = await asyncio.gather(
        post(server, input=asked[:2]), post(server, input=asked[2]), post(server, input=asked[3])
    )
    after = executions(server)

    got = [row["embedding"] for answer in answers for row in answer.json["data"]]
    for tokens, embedding in zip(asked, got, strict=True):
        np.testing.assert_allclose(embedding, expected(tokens), rtol=1e-5)
    assert 4 == after[1] - before[1]
    # The three texts of up to four tokens may share an execution; the longer one has its own.
    assert after[0] - before[0] < 3


async def test_an_embedding_is_cut_where_the_model_declares_it(server: RunningServer) -> None:
    answer = await post(server, input=[[9, 10], [20] * 8], dimensions=4, user="me")
    refused = await post(server, input="a", dimensions=3)

    for tokens, row in zip([[9, 10], [20] * 8], answer.json["data"], strict=True):
        wanted = expected(tokens)[:4]
        np.testing.assert_allclose(row["embedding"], wanted / np.linalg.norm(wanted), rtol=1e-5)
    assert (400, "dimensions") == (refused.status, refused.json["error"]["param"])
    assert "expected 2, 4, 8" in refused.error


INPUTS: list[tuple[Any, str, str]] = [
    ([], "input", "at least one string or token"),
    ("abcdefgh", "input", "1 to 8 tokens (the model's max_tokens), got 9"),
    (["a", "abcdefgh"], "input[1]", "got 9"),
    (["a", "b" * 513], "input[1]", "at most 512 characters"),
    ([[9], []], "input[1]", "1 to 8 tokens"),
    (["a"] * 7, "input", "at most 6 inputs (max_embedding_inputs), got 7"),
    ([32], "input", "token ids of 0 to 31, got 32"),
    ([1, "a"], "input", "only strings, only token ids"),
    ([-1], "input[0]", ">= 0"),
    (None, "input", "got null"),
    ({"a": 1}, "input", "expected"),
]


async def test_inputs_that_the_model_cannot_take_are_refused(server: RunningServer) -> None:
    for given, param, said in INPUTS:
        answer = await post(server, input=given)

        assert (400, param) == (answer.status, answer.json["error"]["param"]), given
        assert said in answer.error, (given, answer.error)
        is_long = "got 9" in said or "characters" in said
        assert is_long == (answer.json["error"]["code"] == "context_length_exceeded")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"truncate": True}, "truncate"),
    ]
    for fields, param in refused:
        answer = await post(server, input="a", **fields)
        assert (400, param) == (answer.status, answer.json["error"]["param"])
    await until_idle(server)


async def test_a_hidden_model_is_not_there_and_one_of_something_else_is_named(
    server: RunningServer,
) -> None:
    assert server.http is not None
    hidden = await post(server, STRANGER, input="a")
    nobody = await ask(server.http, "POST", "/openai/v1/embeddings", body=b"{}")

    assert (404, "model_not_found") == (hidden.status, hidden.json["error"]["code"])
    assert 401 == nobody.status


async def test_a_chat_with_an_embedding_model_names_its_endpoint(server: RunningServer) -> None:
    assert server.http is not None
    body = json.dumps({"model": "words", "messages": [{"role": "user", "content": "a"}]}).encode()
    headers = ("Authorization", f"Bearer {OWNER}")
    answer = await ask(server.http, "POST", "/v1/chat/completions", headers, body=body)

    text = answer.json["error"]["message"]
    assert text.endswith("or a request to /v1/embeddings, got 'words', which makes embeddings")


async def test_a_queue_that_is_full_is_429_and_nothing_stays_held(
    serve: Serve, tmp_path: Path
) -> None:
    tiny_embedding.export(tmp_path / "models" / "words")
    async with serve(
        tmp_path / "models",
        load_model=("words",),
        http_endpoint="port:0",
        max_requests_per_model=1,
    ) as server:
        # Only one of several executions of a request may be in progress at a time.
        server.gather("words", 4)
        answer = await post(server, input=[[9] * 3, [9] * 8])
        await until_idle(server)

    assert (429, "rate_limit_exceeded") == (answer.status, answer.json["error"]["code"])
    assert "max_requests_per_model" in answer.error


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"mask": "masks"}, "mask: expected one of input_ids, attention_mask, got 'masks'"),
    ({"max_tokens": 9}, "max_tokens: expected at most 8, the largest size that is compiled"),
    ({"dimensions": [9]}, "dimensions: expected sizes of 1 to 8, got [9]"),
    ({"output": "y"}, "output: expected the name of one of embedding, got 'y'"),
    ({"pad": 32, "vocab": 32}, "pad: expected a token id of 0 to 31, got 32"),
    ({"cut": 1}, "unknown field `cut`"),
]


async def test_a_declaration_that_the_model_does_not_keep_fails_its_load(
    serve: Serve, tmp_path: Path
) -> None:
    path = tiny_embedding.export(tmp_path / "models" / "words")
    identity_models.write(tmp_path / "models", "echo", "FP32")
    echo = tmp_path / "models" / "echo" / "config.json"
    said_of_echo = {"parameters": {"embeddings": {"string_value": "true"}}}
    echo.write_text(json.dumps({**json.loads(echo.read_text()), **said_of_echo}))
    config = json.loads((path / "config.json").read_text())
    async with serve(tmp_path / "models") as server:
        load = server.application.control.load
        for declared, said in WRONG:
            config["parameters"]["embeddings"]["string_value"] = json.dumps(declared)
            (path / "config.json").write_text(json.dumps(config))
            with pytest.raises(LoadFailed) as refused:
                await load("words")
            assert "parameter 'embeddings': " in str(refused.value)
            assert said in str(refused.value)
        with pytest.raises(LoadFailed, match="got a model of identity"):
            await load("echo")


@pytest.mark.slow
async def test_an_imported_encoder_is_served_as_sentence_transformers_has_it(
    serve: Serve, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(encoders.DATA / "bert", source)
    encoders.write_tensors(source, "bert")
    arguments = [str(source), str(tmp_path / "models" / "words"), "--dim", "tokens=8,24"]
    said = CliRunner().invoke(
        application(), ["import", *arguments, "--max-batch-size", "2"], catch_exceptions=False
    )
    async with serve(tmp_path / "models", load_model=("words",), http_endpoint="port:0") as server:
        answer = await post(server, input=list(references.TEXTS))
        long = await post(server, input="a " * 23)

    with np.load(encoders.DATA / "bert" / "references.npz") as found:
        wanted = found["embeddings"]
    got = [row["embedding"] for row in answer.json["data"]]
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert "embeddings of 32 of length 1 (mean), compiled for 8, 24 tokens" in said.output
    assert "omitted, since embeddings do not need it: pooler.dense.bias" in said.output
    assert (400, "context_length_exceeded") == (long.status, long.json["error"]["code"])


async def test_the_event_loop_goes_on_while_a_short_text_is_encoded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests are served while a regular expression takes seconds on a few characters."""
    begun, answered = threading.Event(), threading.Event()
    was_answered: list[bool] = []

    def encode(self: Tokens, text: str) -> list[int]:
        begun.set()
        was_answered.append(answered.wait(30))
        return tokens_of(text)

    monkeypatch.setattr(Tokens, "encode", encode)
    held = asyncio.ensure_future(post(server, input="abc"))
    async with asyncio.timeout(60):
        while not begun.is_set():
            await asyncio.sleep(0.001)
        assert server.http is not None
        listed = await ask(server.http, "GET", "/v1/models", ("Authorization", f"Bearer {OWNER}"))
    answered.set()
    embedded = await held

    assert [True] == was_answered
    assert (200, 200) == (listed.status, embedded.status)
