"""Debian's reverse proxies in front of a server, each with its file from deploy/proxies."""

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from support.conditions import MOST_SECONDS
from support.tools import program

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "proxies"
NAME = "models.example"
"""Server name in the configuration files."""
_MODULES = Path("/usr/lib/apache2/modules")
_LOADED = (
    *("mpm_event", "authz_core", "headers", "ssl", "http2", "proxy", "proxy_http"),
    *("proxy_http2", "rewrite", "socache_shmcb"),
)


@dataclass(frozen=True)
class Backend:
    """The server behind a proxy."""

    rest: str
    grpc: str
    authority: Path | None = None
    """CA certificate for verifying the server; None if it has no TLS."""


@dataclass(frozen=True)
class Proxy:
    """A reverse proxy program."""

    name: str
    file: str
    programs: Sequence[str]
    speaks_grpc: bool = True
    has_tls: bool = True

    def command(self, folder: Path) -> Sequence[str]:
        """Return the command that runs it in the foreground with the files in a folder."""
        path = program(*self.programs)
        return [path, *(part.format(folder=folder) for part in _ARGUMENTS[self.name])]


_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "nginx": ("-p", "{folder}", "-c", "main.conf"),
    "HAProxy": ("-db", "-f", "{folder}/haproxy.cfg"),
    "Caddy": ("run", "--config", "{folder}/Caddyfile", "--adapter", "caddyfile"),
    "Apache": ("-DFOREGROUND", "-d", "{folder}", "-f", "{folder}/main.conf"),
    "Varnish": ("-F", "-n", "{folder}/state", "-f", "{folder}/varnish.vcl", "-s", "malloc,64m"),
}
PROXIES = (
    Proxy("nginx", "nginx.conf", ("nginx", "/usr/sbin/nginx")),
    Proxy("HAProxy", "haproxy.cfg", ("haproxy", "/usr/sbin/haproxy")),
    Proxy("Caddy", "Caddyfile", ("caddy",)),
    Proxy("Apache", "apache.conf", ("apache2", "/usr/sbin/apache2")),
    Proxy(
        "Varnish",
        "varnish.vcl",
        ("varnishd", "/usr/sbin/varnishd"),
        speaks_grpc=False,
        has_tls=False,
    ),
)
_MAIN: Mapping[str, str] = {
    "nginx": """
        daemon off; worker_processes 1; user root; pid {folder}/pid; error_log {folder}/errors;
        events {{}}
        http {{
            access_log off;
            client_body_temp_path {folder}/a; proxy_temp_path {folder}/b;
            fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
            include {folder}/nginx.conf;
        }}
        """,
    "Apache": """
        ServerRoot {folder}
        PidFile {folder}/pid
        ErrorLog {folder}/errors
        DefaultRuntimeDir {folder}
        User www-data
        Group www-data
        ServerName localhost
        {modules}
        Include {folder}/apache.conf
        """,
}


def written(proxy: Proxy, backend: Backend, port: int, certificates: Path) -> str:
    """Return the configuration file, adapted to this test's backend and port."""
    text = (FOLDER / proxy.file).read_text()
    if backend.authority is not None:
        text = to_tls(proxy, text)
        text = text.replace("/etc/ssl/server-ca.pem", str(backend.authority))
    for known, here in (("8000", backend.rest), ("8001", backend.grpc)):
        actual = here.rpartition(":")[2]
        text = re.sub(rf'(?<=[:"]){known}\b', actual, text)
    text = text.replace("/etc/ssl/models.", f"{certificates}/models.")
    listening = {
        "nginx": ("listen 443 ", f"listen 127.0.0.1:{port} "),
        "HAProxy": ("bind :443 ", f"bind 127.0.0.1:{port} "),
        "Caddy": (f"{NAME}:443 {{", f"{NAME}:{port} {{\n\tbind 127.0.0.1"),
        "Apache": ("Listen 443", f"Listen 127.0.0.1:{port}"),
        "Varnish": ("", ""),  # set by a command-line flag
    }
    return text.replace(*listening[proxy.name]).replace("*:443", f"*:{port}")


def to_tls(proxy: Proxy, text: str) -> str:
    """Enable the lines for a TLS backend, as the file's header explains."""
    if proxy.name == "Apache":
        text = text.replace('"h2c://', '"h2://').replace('"http://', '"https://')
        text = text.replace("//127.0.0.1:", "//localhost:")
    lines = [line for line in text.splitlines() if not line.endswith("# plain")]
    return "\n".join(re.sub(r"#tls ", "", line) for line in lines) + "\n"


@asynccontextmanager
async def running(
    proxy: Proxy, backend: Backend, certificates: Path, folder: Path
) -> AsyncIterator[int]:
    """Run a proxy in front of a backend for the duration of a block; yields its port."""
    port = free_port()
    text = written(proxy, backend, port, certificates)
    (folder / proxy.file).write_text(text)
    if proxy.name in _MAIN:
        modules = "\n".join(f"LoadModule {m}_module {_MODULES}/mod_{m}.so" for m in _LOADED)
        main = _MAIN[proxy.name].format(folder=folder, modules=modules)
        (folder / "main.conf").write_text(main)
    command = [*proxy.command(folder)]
    if proxy.name == "Varnish":
        command += ["-a", f"127.0.0.1:{port}"]
    with (folder / "output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=output,
            stderr=output,
            env={**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder)},
            start_new_session=True,
        )
    try:
        await _listens(port, process, folder)
        yield port
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGTERM)
        async with asyncio.timeout(MOST_SECONDS):
            await process.wait()


async def _listens(port: int, process: asyncio.subprocess.Process, folder: Path) -> None:
    async with asyncio.timeout(MOST_SECONDS):
        while True:
            assert process.returncode is None, told(folder)
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


def told(folder: Path) -> str:
    """Return the output of a proxy."""
    files = [folder / "output", folder / "errors"]
    return "\n".join(file.read_text() for file in files if file.exists())[-4000:]


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
