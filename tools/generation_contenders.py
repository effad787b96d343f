"""The contenders of tools/compare_generation.py: the server, and its peers in other processes."""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from generation_checkpoint import LENGTH

TOOLS = Path(__file__).resolve().parent
SLOTS = 16
START_SECONDS = 600.0


@dataclass(frozen=True)
class Request:
    """One request: when it is due, its prompt, and the number of tokens requested."""

    due: float
    prompt: list[int]
    count: int


@dataclass
class Measured:
    """One measurement: tokens per second, and the latency of each request from its due time."""

    rate: float = 0.0
    waits: list[float] = field(default_factory=list)


class Contender(Protocol):
    """A server or library that generates tokens."""

    name: str

    async def run(self, requests: Sequence[Request]) -> Measured:
        """Send requests when they are due, and measure."""
        ...

    async def tokens(self, prompt: list[int], count: int) -> list[int]:
        """Return the greedy continuation of a prompt."""
        ...


class Streaming:
    """A server with an HTTP API that streams one event (SSE) per token."""

    name: str

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    def body(self, prompt: list[int], count: int) -> Mapping[str, Any]:
        """Return the JSON of a request."""
        raise NotImplementedError

    def token(self, event: Mapping[str, Any]) -> int | None:
        """Return the token of an event, or None if it has none."""
        raise NotImplementedError

    async def run(self, requests: Sequence[Request]) -> Measured:
        """Send each request when it is due."""
        began = time.perf_counter()
        ends = await asyncio.gather(*(self._one(began, request) for request in requests))
        return measured(requests, began, ends)

    async def _one(self, began: float, request: Request) -> float:
        await asyncio.sleep(max(0.0, began + request.due - time.perf_counter()))
        times = [at async for at, _ in self.events(request.prompt, request.count)]
        # Events with several tokens, or none, would distort a measurement that counts events.
        assert len(times) >= request.count, f"{len(times)} events of {request.count} tokens"
        return times[-1]

    async def tokens(self, prompt: list[int], count: int) -> list[int]:
        """Return the greedy continuation of a prompt."""
        lines = [json.loads(line[5:]) async for _, line in self.events(prompt, count)]
        return [token for token in map(self.token, lines) if token is not None]

    async def events(self, prompt: list[int], count: int) -> AsyncIterator[tuple[float, bytes]]:
        """Yield each event's arrival time and line."""
        async with self._session.post(self._url, json=self.body(prompt, count)) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data:"):
                    yield time.perf_counter(), line


class Server(Streaming):
    """xlaserve, over REST."""

    name = "xlaserve"

    def __init__(self, session: aiohttp.ClientSession, root: str, seconds: float) -> None:
        super().__init__(session, f"{root}/v2/models/llama/generate_stream")
        self.start_seconds = seconds
        """Seconds from its start until it was ready."""

    def body(self, prompt: list[int], count: int) -> Mapping[str, Any]:
        """Return the JSON of a request."""
        return {"tokens": prompt, "max_tokens": count, "ignore_eos": True}

    def token(self, event: Mapping[str, Any]) -> int | None:
        """Return the token of an event."""
        found: int = event["token"]
        return found


class LlamaCpp(Streaming):
    """llama.cpp's server: it batches continuously, with as many slots as ours."""

    def __init__(self, session: aiohttp.ClientSession, root: str, name: str) -> None:
        super().__init__(session, f"{root}/completion")
        self.name = name

    def body(self, prompt: list[int], count: int) -> Mapping[str, Any]:
        """Return the JSON of a request."""
        asked = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True}
        # Every prompt is new, so looking for cached prefixes would only cost time.
        return {**asked, "cache_prompt": False, "return_tokens": True, "stream": True}

    def token(self, event: Mapping[str, Any]) -> int | None:
        """Return the token of an event; the last one has none."""
        return next(iter(event["tokens"]), None)


class Static:
    """Static batching: pending requests start together, and later ones wait for the whole batch."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    async def run(self, requests: Sequence[Request]) -> Measured:
        """Answer requests in batches of at most SLOTS."""
        began, left, ends = time.perf_counter(), list(requests), list[float]()
        while left:
            now = time.perf_counter() - began
            batch = [one for one in left if one.due <= now][:SLOTS]
            if not batch:
                await asyncio.sleep(max(0.0, left[0].due - now))
                continue
            left = [one for one in left if one not in batch]
            await self._generate([one.prompt for one in batch], [one.count for one in batch])
            ends += [time.perf_counter()] * len(batch)
        return measured(requests, began, ends)

    async def tokens(self, prompt: list[int], count: int) -> list[int]:
        """Return the greedy continuation of a prompt."""
        (found,) = await self._generate([prompt], [count])
        return found

    async def _generate(self, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"prompts": prompts, "counts": counts}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        await self._process.stdin.drain()
        found: list[list[int]] = json.loads(await self._process.stdout.readline())["tokens"]
        return found


def measured(requests: Sequence[Request], began: float, ends: Iterable[float]) -> Measured:
    """Return the rate of the requested tokens; surplus ones of a static batch do not count."""
    ended = list(ends)
    first = began + min(request.due for request in requests)
    tokens = sum(request.count for request in requests)
    waits = [end - began - one.due for one, end in zip(requests, ended, strict=True)]
    return Measured(tokens / (max(ended) - first), waits)


async def import_model(folder: Path) -> None:
    """Import the checkpoint in a directory for the server."""
    model = folder / "models" / "llama"
    command = (sys.executable, "-m", "xlaserve.cli", "import", str(folder / "llama"), str(model))
    made = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert await made.wait() == 0
    sizes = {"slots": SLOTS, "length": LENGTH, "windows": f"256,{LENGTH}", "chunk": 64}
    written = {name: {"string_value": str(value)} for name, value in sizes.items()}
    (model / "config.json").write_text(json.dumps({"parameters": written}))


@asynccontextmanager
async def serving(folder: Path, session: aiohttp.ClientSession) -> AsyncIterator[Server]:
    """Serve the imported model in a directory, which also holds its compilation cache."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    cache = folder / "compiled"
    cache.mkdir(mode=0o700, exist_ok=True)
    options = (
        *("--model-control-mode", "explicit", "--load-model", "llama", "--device", "cpu"),
        *("--http-endpoint", f"port:{port}", "--grpc-endpoint", "port:0"),
        *("--compilation-cache-directory", str(cache)),
    )
    began = time.perf_counter()
    served = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "xlaserve.cli", "serve", str(folder / "models"), *options),
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    root = f"http://127.0.0.1:{port}"
    try:
        await _until_ready(session, root)
        yield Server(session, root, time.perf_counter() - began)
    finally:
        served.terminate()
        await served.wait()


async def _until_ready(session: aiohttp.ClientSession, root: str) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            try:
                async with session.get(f"{root}/v2/models/llama/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # it is not listening yet
            await asyncio.sleep(0.2)


@asynccontextmanager
async def static_batches(python: Path, folder: Path) -> AsyncIterator[Static]:
    """Start transformers, with a Python that has it installed."""
    async with _peer(python, "generation_peer.py", str(folder / "llama"), cores()) as (line, made):
        yield Static(line, made)


@asynccontextmanager
async def llama_cpp(
    python: Path, folder: Path, session: aiohttp.ClientSession
) -> AsyncIterator[LlamaCpp]:
    """Start llama.cpp's server, with a Python that has it installed."""
    sizes = (str(SLOTS), str(LENGTH), cores())
    arguments = (str(folder / "llama"), str(folder / "llama.gguf"), *sizes)
    async with _peer(python, "llama_cpp_peer.py", *arguments) as (line, _):
        found = json.loads(line)
        yield LlamaCpp(session, found["url"], found["name"])


@asynccontextmanager
async def _peer(
    python: Path, tool: str, *arguments: str
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Start a script, and yield the first line that it prints."""
    process = await asyncio.create_subprocess_exec(
        *(str(python), str(TOOLS / tool), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise SystemExit(f"{tool} did not start with {python}")
        yield line, process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def cores() -> str:
    """Return the number of cores of this process, which is each peer's number of threads."""
    return str(len(os.sched_getaffinity(0)))
