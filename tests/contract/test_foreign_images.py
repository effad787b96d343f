"""Images of one tenant that decode to much or cannot be decoded, beside the images of another."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from PIL import Image
from support.conditions import until
from support.http import ask
from support.server import RunningServer, serving
from tritonclient.utils import InferenceServerException

import xlaserve
from acceptance.pictures import jpeg, png
from xlaserve.serving.access.tokens import digest_of, new_token

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE, GOOD = new_token(), new_token()
TENANTS = {"hostile": HOSTILE, "good": GOOD}
SIDE = 2900
DECODED_BYTES = SIDE * SIDE * 12 + 2 * 2 * 3 * 4
"""Memory to decode an image of that many pixels, and its tensor: 101 MB."""
COUNT = 3
"""Hostile requests at a time."""


class Hostile(NamedTuple):
    """An image, and what becomes of it."""

    file: Callable[[], bytes]
    told: str
    """Part of the error."""
    least_bytes: int = 0
    """Bytes that the ledger holds for it, at least."""
    is_crowded: bool = False
    """Whether others hold most of the ledger."""
    statuses: tuple[str, ...] = ("400", "StatusCode.INVALID_ARGUMENT")


CUT_OFF = partial(png, SIDE, SIDE, bytes(SIDE * SIDE // 2))
IMAGES: Mapping[str, Hostile] = {
    "claims 4 gigapixels": Hostile(
        partial(png, 65_535, 65_535, bytes(1 << 20)), "(max_image_pixels) as element 0"
    ),
    "claims 100 MB and is cut off": Hostile(
        CUT_OFF, "an image that can be decoded as element 0", DECODED_BYTES
    ),
    "claims 100 MB, more than is left": Hostile(
        CUT_OFF,
        f"the decoded images of {DECODED_BYTES}",
        is_crowded=True,
        statuses=("503", "StatusCode.RESOURCE_EXHAUSTED"),
    ),
    "half a JPEG": Hostile(
        lambda: jpeg()[: len(jpeg()) // 2], "an image that can be decoded as element 0"
    ),
    "a JPEG without pixels": Hostile(lambda: jpeg()[:200], "a complete JPEG as element 0"),
}


def plus_one(parameters: Any, x: jax.Array) -> Mapping[str, jax.Array]:
    return {"y": x[:, 0, 0] + 1}


@dataclass(frozen=True)
class Place:
    server: RunningServer

    async def rest(self, tenant: str, file: bytes) -> tuple[str, str]:
        """Return status and text of an answer, or the numbers of a good one."""
        element = len(file).to_bytes(4, "little") + file
        given = {"binary_data_size": len(element)}
        image = {"name": "x", "shape": [1], "datatype": "BYTES", "parameters": given}
        head = json.dumps({"inputs": [image]}).encode()
        headers = (
            ("Authorization", f"Bearer {TENANTS[tenant]}"),
            ("Inference-Header-Content-Length", str(len(head))),
        )
        path = f"/v2/models/{tenant}-eye/infer"
        assert self.server.http is not None
        found = await ask(self.server.http, "POST", path, *headers, body=head + element)
        if found.status != 200:
            return str(found.status), found.body.decode()
        return "OK", str(found.json["outputs"][0]["data"])

    async def grpc(self, tenant: str, file: bytes, *, stream: bool) -> tuple[str, str]:
        """Return status and text of an answer, or the numbers of a good one."""
        tensor = triton.InferInput("x", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([file], object))
        asked = {"model_name": f"{tenant}-eye", "inputs": [tensor]}
        headers = {"authorization": f"Bearer {TENANTS[tenant]}"}

        async def sent() -> AsyncIterator[dict[str, Any]]:
            yield asked

        async with triton.InferenceServerClient(self.server.url) as client:
            try:
                if not stream:
                    answer: Any = await client.infer(**asked, headers=headers)
                else:
                    answers: Any = client.stream_infer(sent(), headers=headers)
                    answer, error = await anext(answers)
                    if error is not None:
                        raise error
            except InferenceServerException as error:
                return error.status() or "", error.message()
        return "OK", str(answer.as_numpy("y").ravel().tolist())


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="place")
async def _place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("images")
    shape = {"x": ("FP32", [-1, 2, 2, 3])}
    rules = []
    for tenant, token in TENANTS.items():
        place = folder / "models" / f"{tenant}-eye" / "1"
        xlaserve.export_model(plus_one, None, shape, place, max_batch_size=4)
        may = {"allow": ["infer"], "models": [f"{tenant}-*"]}
        rules.append({"name": tenant, "token": digest_of(token), **may})
    (folder / "rules.json").write_text(json.dumps({"caller": rules}))
    running = serving(
        folder,
        folder / "models",
        load_model=("*",),
        http_endpoint="port:0",
        access_rules=str(folder / "rules.json"),
    )
    async with running as server:
        yield Place(server)


DOORS: Mapping[str, Callable[[Place, str, bytes], Awaitable[tuple[str, str]]]] = {
    "REST": Place.rest,
    "ModelInfer": partial(Place.grpc, stream=False),
    "ModelStreamInfer": partial(Place.grpc, stream=True),
}


def plain(level: int) -> bytes:
    """Make an image of one colour."""
    written = io.BytesIO()
    Image.new("RGB", (2, 2), (level, level + 1, level + 2)).save(written, "PNG")
    return written.getvalue()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("image", IMAGES)
async def test_an_image_is_refused_and_those_of_another_tenant_are_answered(
    place: Place, image: str, door: str
) -> None:
    """Its memory is on the ledger before it is decoded, and leaves it."""
    row, ledger = IMAGES[image], place.server.application.ledger
    file = row.file()
    await until(lambda: not ledger.held)
    peak, others = ledger.watch(), ledger.open()
    if row.is_crowded:
        others.hold(ledger.limit - 2 * DECODED_BYTES)
    levels = range(0, 240, 10)
    asked = [(one, level) for one in DOORS.values() for level in levels]
    async with asyncio.timeout(60):
        hostile = [asyncio.ensure_future(DOORS[door](place, "hostile", file)) for _ in range(COUNT)]
        good = await asyncio.gather(*(one(place, "good", plain(level)) for one, level in asked))
        refused = await asyncio.gather(*hostile)
    others.close()
    await until(lambda: not ledger.held)
    most = peak.take()

    assert [("OK", str([float(level + more) for more in (1, 2, 3)])) for _, level in asked] == good
    for status, told in refused:
        assert row.told in told
        assert status in row.statuses or (door == "ModelStreamInfer" and not status)
    assert row.least_bytes <= most <= ledger.limit
