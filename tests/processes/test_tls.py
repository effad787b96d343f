"""TLS client certificates on a server of two processes: every worker requests them."""

import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import trustme
from support import several
from support.tls import write_certificate

pytestmark = pytest.mark.slow


async def test_every_worker_asks_clients_for_their_certificates(tmp_path: Path) -> None:
    """Each worker refuses clients without one; the others are spread over all workers."""
    authority = trustme.CA()
    given = write_certificate(authority, tmp_path)
    chain = tmp_path / "clients.pem"
    authority.cert_pem.write_to_path(str(chain))
    flags = ("--tls-certificate", given["tls_certificate"], "--tls-key", given["tls_key"])
    context = ssl.create_default_context()
    authority.configure_trust(context)
    known = ssl.create_default_context()
    authority.configure_trust(known)
    authority.issue_cert("client").configure_cert(known)
    models = several.repository(tmp_path / "models")
    found, refused = set[int](), 0
    async with several.several(models, *flags, "--tls-client-ca", str(chain)) as server:
        url = f"https://localhost:{server.http.rpartition(':')[2]}/v2/models/who/infer"
        async with AsyncExitStack() as open_sessions:
            # While one worker has more connections, the next goes to the other one.
            for _ in range(4):
                session = await open_sessions.enter_async_context(aiohttp.ClientSession())
                async with session.post(url, json=several.who(), ssl=known) as response:
                    answer = await response.json()
                    found.add(answer["outputs"][0]["data"][0])
        for _ in range(6):
            async with aiohttp.ClientSession() as session:
                try:
                    async with session.post(url, json=several.who(), ssl=context):
                        pass
                except aiohttp.ClientError:
                    refused += 1

    assert set(several.workers(server).values()) == found
    assert 6 == refused
