"""Shared fixtures: certificates, and a server behind each proxy."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest
import trustme
from support import generating, identity_models
from support.proxy_place import Place
from support.proxy_programs import NAME, Backend, Proxy, running
from support.server import serving
from support.tls import write_certificate

ORIGIN = "https://page.example"
"""The page origin that the server allows."""


class Placed(Protocol):
    """Runs a server behind several proxies in parallel, for the length of a block."""

    def __call__(self, *proxies: Proxy, tls: bool) -> AbstractAsyncContextManager[list[Place]]:
        """Choose whether the server and the proxies use TLS between them."""
        ...


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Placed:
    generation = generating.install(monkeypatch)
    models = tmp_path / "models"
    for name in ("m", generating.PREFIX, f"{generating.PREFIX}{generating.IN_ORDER}"):
        identity_models.write(models, name, "FP32")
    certificates = tmp_path / "certificates"
    certificates.mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(certificates / "ca.pem")
    issued = authority.issue_cert(NAME)
    chain, key = certificates / "models.pem", certificates / "models.key"
    chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    (certificates / "models.pem.key").write_bytes(key.read_bytes())
    for path in (tmp_path, *tmp_path.parents[:2], certificates):
        path.chmod(0o755)
    for file in certificates.iterdir():
        file.chmod(0o644)

    @asynccontextmanager
    async def place(*proxies: Proxy, tls: bool) -> AsyncIterator[list[Place]]:
        shown = write_certificate(authority, tmp_path, "localhost", NAME) if tls else {}
        log = tmp_path / "access.jsonl"
        async with (
            serving(
                tmp_path,
                models,
                http_endpoint="port:0",
                load_model=("*",),
                allowed_host=(NAME,),
                trusted_proxy=("127.0.0.1",),
                cors_origin=(ORIGIN,),
                access_log=str(log),
                max_message_bytes=64 << 20,
                execution_seconds=300,
                # A silent stream behind each proxy occupies a thread.
                execute_threads=16,
                **shown,
            ) as server,
            AsyncExitStack() as stack,
        ):
            assert server.http is not None
            verified, known = certificates / "ca.pem" if tls else None, certificates / "ca.pem"
            backend = Backend(server.http, server.url, verified)
            places = []
            for proxy in proxies:
                folder = tmp_path / proxy.name
                folder.mkdir()
                folder.chmod(0o777)
                started = running(proxy, backend, certificates, folder)
                port = await stack.enter_async_context(started)
                places.append(Place(proxy, server, generation, port, known, log, folder))
            yield places

    return place
