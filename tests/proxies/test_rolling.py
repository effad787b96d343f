"""Rolling restarts of two servers behind a proxy: no request fails."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from support import identity_models
from support.conditions import MOST_SECONDS
from support.process import ServerProcess, served
from support.tools import program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROLLS = 20
CLIENTS = 4
ANSWERS = 10
"""Answers that must arrive in each phase of a restart before the next phase begins."""

NGINX = """
{user}
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream models {{
    server unix:{one} max_fails=0;
    server unix:{two} max_fails=0;
    keepalive 8;
  }}
  server {{
    listen unix:{socket};
    location / {{
      proxy_pass http://models;
      proxy_http_version 1.1;
      proxy_set_header Host localhost;
      proxy_set_header Connection "";
      proxy_next_upstream error timeout http_503 non_idempotent;
    }}
  }}
}}
"""
HAPROXY = """
defaults
  mode http
  timeout connect 60s
  timeout client 60s
  timeout server 60s
  retries 4
  option redispatch 1
  retry-on conn-failure empty-response 503
frontend clients
  bind unix@{socket}
  default_backend models
backend models
  option httpchk GET /v2/health/ready
  http-check send hdr Host localhost
  http-request set-header Host localhost
  server one unix@{one} check inter 200ms
  server two unix@{two} check inter 200ms
"""


@asynccontextmanager
async def running(folder: Path, *command: str) -> AsyncIterator[Path]:
    """Run a proxy for the length of a block, which starts once its socket exists."""
    process = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.PIPE, cwd=folder
    )
    socket = folder / "proxy.sock"
    try:
        async with asyncio.timeout(MOST_SECONDS):
            while not socket.exists():
                assert process.returncode is None, await process.communicate()
                await asyncio.sleep(0.01)
        yield socket
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


def commands(name: str, folder: Path) -> list[str]:
    """Write a proxy's configuration; return the command that runs it."""
    places = {
        "folder": folder,
        "socket": folder / "proxy.sock",
        "one": folder / "one.sock",
        "two": folder / "two.sock",
    }
    file = folder / f"{name}.conf"
    if name == "nginx":
        user = "user root;" if os.geteuid() == 0 else ""
        file.write_text(NGINX.format(user=user, **places))
        return [program("nginx"), "-p", str(folder), "-c", str(file), "-e", str(folder / "error")]
    file.write_text(HAPROXY.format(**places))
    return [program("haproxy"), "-db", "-f", str(file)]


@dataclass
class Load:
    """Clients that send requests continuously, and the outcomes."""

    socket: Path
    answered: int = 0
    failed: list[str] = field(default_factory=list)

    async def ask(self, client: int) -> None:
        """Send requests forever, with changing values, over persistent connections."""
        connector = aiohttp.UnixConnector(str(self.socket))
        async with aiohttp.ClientSession(connector=connector) as session:
            number = 0
            while True:
                number += 1
                data = [client, number]
                tensor = {"name": "x", "shape": [2], "datatype": "INT32", "data": data}
                body = json.dumps({"inputs": [tensor]})
                url = "http://localhost/v2/models/m/infer"
                try:
                    async with session.post(url, data=body) as answer:
                        text = await answer.text()
                        right = answer.status == 200 and json.loads(text)["outputs"][0]["data"]
                except (OSError, aiohttp.ClientError) as error:
                    text, right = repr(error), None
                if right == data:
                    self.answered += 1
                else:
                    self.failed.append(text)

    async def goes_on(self) -> None:
        """Wait until this many more requests have been answered."""
        until = self.answered + ANSWERS * CLIENTS
        async with asyncio.timeout(MOST_SECONDS):
            while self.answered < until and not self.failed:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def started(models: Path, socket: Path, until: str) -> AsyncIterator[ServerProcess]:
    async with served(models, "--http-endpoint", f"unix:{socket}", until=until) as server:
        yield server


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
async def test_no_request_fails_while_a_server_is_rolled(tmp_path: Path, name: str) -> None:
    """From its SIGTERM through its exit and its restart until it is ready."""
    models = tmp_path / "models"
    identity_models.write(models, "m", "INT32")
    command = commands(name, tmp_path)
    async with (
        started(models, tmp_path / "one.sock", "started"),
        running(tmp_path, *command) as socket,
    ):
        load = Load(socket)
        asking: list[asyncio.Task[None]] = []
        try:
            for roll in range(ROLLS + 1):
                async with started(models, tmp_path / "two.sock", "listening") as rolled:
                    if not asking:
                        asking = [asyncio.ensure_future(load.ask(at)) for at in range(CLIENTS)]
                    # While it loads its repository, and once it is ready.
                    await load.goes_on()
                    await rolled.until("started")
                    await load.goes_on()
                    rolled.process.send_signal(signal.SIGTERM)
                    await load.goes_on()
                    assert 0 == await rolled.ended(), roll
                await load.goes_on()
                assert [] == load.failed, (roll, load.answered)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
