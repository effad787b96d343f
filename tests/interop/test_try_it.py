"""Trying a model on its page: typed or dropped inputs, outputs, and example calls."""

import asyncio
import base64
import io
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image
from support import identity_models
from support.browser import Page
from support.process import ServerProcess, run_bytes, served
from support.tools import program

LABELS = ["cat", "dog", "<b>bird</b>"]
SIDE = 8
CLASSES = {"shape": "1, 3", "elements": "0.25 0.5 -1e-1"}

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    identity_models.write(root, "texts", "BYTES")
    identity_models.write(root, "longs", "INT64")
    identity_models.write(root, "picture", "FP32", (-1, SIDE, SIDE, 3))
    identity_models.write(root, "classes", "FP32", (-1, len(LABELS)))
    config = json.loads((root / "classes" / "config.json").read_text())
    config["output"][0]["label_filename"] = "labels.txt"
    (root / "classes" / "config.json").write_text(json.dumps(config))
    (root / "classes" / "labels.txt").write_text("\n".join(LABELS))
    async with served(root) as server:
        yield server


async def show(page: Page, server: ServerProcess, model: str) -> None:
    """Open the form of a model."""
    page.complaints.clear()
    await page.open("about:blank")
    await page.open(f"http://{server.http}/#/models/{model}")
    await page.until("document.querySelector('#try-inputs .field') !== null")


async def enter(page: Page, *, shape: str, elements: str) -> None:
    await page.evaluate(
        f"document.querySelector('.field input').value = {json.dumps(shape)};"
        f"document.querySelector('.field textarea').value = {json.dumps(elements)};"
        "document.getElementById('try-form').dispatchEvent(new Event('input'))"
    )


async def drop(page: Page, name: str, data: bytes) -> None:
    """Drop a file on the first input."""
    await page.evaluate(
        f"{{ const raw = atob('{base64.b64encode(data).decode()}');"
        "const bytes = Uint8Array.from(raw, (c) => c.charCodeAt(0));"
        "const moved = new DataTransfer();"
        f"moved.items.add(new File([bytes], {json.dumps(name)}));"
        "document.querySelector('.field').dispatchEvent("
        "new DragEvent('drop', {dataTransfer: moved, cancelable: true})) }"
    )
    await page.until(f"document.querySelector('.drop').innerText.includes({json.dumps(name)})")


async def send(page: Page) -> str:
    """Submit the form, and return the displayed result."""
    await page.evaluate("document.querySelector('#try-form button').click()")
    await page.until("document.getElementById('try-outputs').childElementCount > 0")
    shown: str = await page.evaluate("document.getElementById('try-outputs').innerText")
    return shown


async def code(page: Page, language: str) -> str:
    text: str = await page.evaluate(
        f"document.getElementById('try-language').value = '{language}';"
        "document.getElementById('try-language').dispatchEvent(new Event('change'));"
        "document.getElementById('try-code').textContent"
    )
    return text


async def form(page: Page, name: str) -> str:
    """Choose another display format for the output, and return the displayed text."""
    shown: str = await page.evaluate(
        "(() => { const choice = document.querySelector('.output select');"
        f"choice.value = '{name}';"
        "choice.dispatchEvent(new Event('change')); })();"
        "document.querySelector('.output div').innerHTML"
    )
    return shown


async def test_labels_a_table_and_a_chart_show_an_answer(page: Page, server: ServerProcess) -> None:
    await show(page, server, "classes")
    await enter(page, **CLASSES)
    labels = await send(page)

    assert labels.index("dog") < labels.index("cat") < labels.index("<b>bird</b>")
    assert "0.25" in await form(page, "table")
    assert "from -0.1" in await form(page, "chart")
    assert [] == page.complaints


async def test_a_picture_that_is_dropped_comes_back_as_a_picture(
    page: Page, server: ServerProcess
) -> None:
    await show(page, server, "picture")
    file = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), (255, 0, 0)).save(file, "PNG")
    await drop(page, "red.png", file.getvalue())
    await send(page)
    pixel = await page.evaluate(
        "[...document.querySelector('#try-outputs canvas').getContext('2d')"
        ".getImageData(1, 1, 1, 1).data]"
    )

    assert [255, 0, 0, 255] == pixel
    assert "is a file" in await code(page, "curl")
    assert [] == page.complaints


async def test_an_array_of_numpy_is_sent_as_it_is(page: Page, server: ServerProcess) -> None:
    await show(page, server, "classes")
    file = io.BytesIO()
    np.save(file, np.array([[1, 2, 3], [0.5, 4, 6]], np.float32))
    await drop(page, "rows.npy", file.getvalue())
    await send(page)

    assert "0.5" in await form(page, "table")
    assert 'np.load("rows.npy")' in await code(page, "Python")
    assert [] == page.complaints


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.asfortranarray(np.ones((2, 3), np.float32)), "expected C order, got Fortran order"),
        (np.ones(3, ">f4"), "an array of >f4"),
    ],
)
async def test_an_array_that_cannot_be_sent_is_refused(
    page: Page, server: ServerProcess, array: Any, told: str
) -> None:
    await show(page, server, "classes")
    file = io.BytesIO()
    np.save(file, array)
    await drop(page, "odd.npy", file.getvalue())

    assert told in await page.evaluate("document.querySelector('.drop').innerText")


async def test_texts_and_large_integers_are_exact(page: Page, server: ServerProcess) -> None:
    await show(page, server, "texts")
    await enter(page, shape="2", elements='it\'s <b>\nnaïve "模"')
    texts = await send(page)
    await show(page, server, "longs")
    await enter(page, shape="1", elements="9007199254740993")
    longs = await send(page)

    assert "it's <b>" in texts
    assert 'naïve "模"' in texts
    assert "9007199254740993" in longs
    assert [] == page.complaints


async def test_what_does_not_fit_is_said_before_it_is_sent(
    page: Page, server: ServerProcess
) -> None:
    await show(page, server, "classes")
    await enter(page, shape="1, 3", elements="1 2")
    count = await code(page, "curl")
    await enter(page, shape="1, 3", elements="1 2 x")

    assert "expected 3 elements, got 2" in count
    assert "expected elements of FP32, got “x”" in await code(page, "curl")


async def test_a_refusal_is_shown(page: Page, server: ServerProcess) -> None:
    await show(page, server, "classes")
    await enter(page, shape="3", elements="1 2 3")
    await page.evaluate("document.querySelector('#try-form button').click()")
    status = "document.getElementById('try-status').textContent"
    told = await page.until(f"{status}.includes('[-1,3]') && {status}")

    assert "'x'" in told or '"x"' in told


async def test_answers_of_a_stream_are_shown_as_they_come(
    page: Page, server: ServerProcess
) -> None:
    """The server is faked, so that events arrive in pieces."""
    await show(page, server, "classes")
    event = json.dumps({"outputs": [{"name": "y", "datatype": "INT32", "shape": [1], "data": [7]}]})
    pieces = [
        f"data: {event}\n",
        "\n",
        f"data: {event}\n\nevent: error\nda",
        'ta: {"error":"late"}\n\n',
    ]
    await page.evaluate(
        f"window.fetch = async () => new Response(new Blob({json.dumps(pieces)}).stream()"
        ".pipeThrough(new TransformStream()),"
        " {headers: {'Content-Type': 'text/event-stream'}}); 0"
    )
    await page.evaluate("document.querySelector('#try-form button').click()")
    await page.until("document.getElementById('try-status').textContent === 'late'")

    assert 2 == await page.evaluate("document.getElementById('try-outputs').childElementCount")


async def test_a_call_has_a_version_only_if_the_address_has_one(
    page: Page, server: ServerProcess
) -> None:
    languages = ("curl", "Python", "JavaScript", "grpcurl")
    await show(page, server, "classes")
    newest = [await code(page, language) for language in languages]
    await show(page, server, "classes/versions/1")
    pinned = [await code(page, language) for language in languages]
    await enter(page, **CLASSES)

    assert not [call for call in newest if "versions/1" in call or '"1"' in call]
    assert all("versions/1" in call or '"1"' in call for call in pinned)
    assert "0.25" in await send(page)


async def test_the_call_is_what_a_shell_and_programs_run(
    page: Page, server: ServerProcess, grpcurl: str, tmp_path: Path
) -> None:
    await show(page, server, "texts")
    await enter(page, shape="2", elements='it\'s $HOME\n"two"')
    port = server.url.rpartition(":")[2]
    calls = {name: await code(page, name) for name in ("curl", "Python", "JavaScript", "grpcurl")}
    (tmp_path / "call.mjs").write_text(calls["JavaScript"])
    shell = calls["grpcurl"].replace("grpcurl", grpcurl, 1).replace(":PORT", f":{port}")
    answers = await asyncio.gather(
        run_bytes(program("bash"), "-c", calls["curl"]),
        run_bytes(sys.executable, "-c", calls["Python"]),
        run_bytes(program("node"), str(tmp_path / "call.mjs")),
        run_bytes(program("bash"), "-c", shell),
    )
    curl, python, node, grpc = [(status, out.decode(), err) for status, out, err in answers]

    assert ["it's $HOME", '"two"'] == json.loads(curl[1])["outputs"][0]["data"], curl
    assert "it's $HOME" in python[1], python
    assert "it's $HOME" in node[1], node
    assert base64.b64encode(b"\n\0\0\0it's").decode()[:6] in grpc[1], grpc
