"""An answer's tensors are on the ledger while it is encoded, even if encoding fails."""

import gc
import json
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support import identity_models
from support.conditions import until
from support.http import chunked, connect, message
from support.server import RunningServer, serving

from xlaserve.errors import OutputNotInForm
from xlaserve.http.sagemaker import sagemaker
from xlaserve.http.v2 import fast_infer, inference

pytestmark = pytest.mark.asyncio(loop_scope="module")

ELEMENTS = 8_200
"""Their JSON is short enough for the fast path, but not encoded in one piece."""
BYTES = 8 * ELEMENTS
PLAIN = json.dumps([0] * ELEMENTS, separators=(",", ":")).encode()
BODY = b'{"inputs":[{"name":"x","datatype":"FP64","shape":[%d],"data":%s}]}' % (ELEMENTS, PLAIN)
JSON = ("Content-Type", "application/json")
MODULES: tuple[Any, ...] = (fast_infer, inference, sagemaker)
DOORS: dict[str, tuple[str, bytes]] = {
    "V2, on the fast path": (
        "write_infer_answer",
        message("POST", "/v2/models/m/infer", JSON, body=BODY),
    ),
    "V2": (
        "write_infer_answer",
        message("POST", "/v2/models/m/infer", JSON, ("Transfer-Encoding", "chunked"))
        + chunked(BODY),
    ),
    "SageMaker, of V2": (
        "write_infer_response",
        message("POST", "/invocations", JSON, body=BODY),
    ),
    "SageMaker": (
        "write_plain_response",
        message("POST", "/invocations", JSON, body=PLAIN),
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def one_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("written")
    identity_models.write(folder / "models", "m", "FP64")
    async with serving(folder, folder / "models", http_endpoint="port:0", sagemaker=True) as server:
        yield server


class Writer:
    """Records what is held during encoding, and may raise an error."""

    def __init__(self, server: RunningServer, write: Callable[..., Any], *, refuses: bool) -> None:
        self._ledger = server.application.ledger
        self._write = write
        self._refuses = refuses
        self.held = 0
        self.written: weakref.ref[Any] = weakref.ref(self)

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.held = self._ledger.held
        written = np.zeros(ELEMENTS)
        self.written = weakref.ref(written)
        if self._refuses:
            raise OutputNotInForm("m", "y", "JSON", "it", "use V2")
        return self._write(*given, **named)


@pytest.mark.parametrize("refuses", [False, True], ids=["written", "refused"])
@pytest.mark.parametrize("door", DOORS)
async def test_an_answer_counts_while_it_is_written(
    door: str, refuses: bool, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, sent = DOORS[door]
    modules = [module for module in MODULES if hasattr(module, name)]
    writer = Writer(server, getattr(modules[0], name), refuses=refuses)
    ledger = server.application.ledger
    async with connect(str(server.http)) as connection:
        await until(lambda: not ledger.held)
        with monkeypatch.context() as changed:
            for module in modules:
                changed.setattr(module, name, writer)
            gc.disable()
            try:
                answer = await connection.ask(sent)
                is_left = writer.written() is not None
            finally:
                gc.enable()
        await until(lambda: not ledger.held)

    assert (406 if refuses else 200) == answer.status, answer.body[:200]
    # The request is held as well: its bytes, and the tensors decoded from them.
    assert writer.held >= len(BODY if BODY in sent else PLAIN) + BYTES
    assert not is_left
