"""Steps that send requests to a server: answers, speed, generation, precision, loads."""

import asyncio
import json
import statistics
import time
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from device.findings import Findings
from device.making import repository
from device.place import EXAMPLES, Place, card_bytes
from device.server import Server
from gpu_check.tolerances import far

_MOST_LOADS = 500
_CHURN_SECONDS = 40


def _examples() -> tuple[str, ...]:
    return ("digits", "identity", "mlp", "simple")


def serve(place: Place, findings: Findings) -> None:
    """Serve the examples: check the answers, and measure two starts."""
    asyncio.run(_serve(place, findings))


async def _serve(place: Place, findings: Findings) -> None:
    names = ("mlp",) if place.quick else _examples()
    folder = repository(place, "serve", *names)
    cache = place.folder / f"cache.serve.{time.time_ns()}"
    used = card_bytes()
    async with Server(place, findings, folder, cache=cache) as server:
        said = server.events("device ready")
        findings.add("ready, nothing compiled before", seconds=server.ready_seconds, device=said)
        await _answers(server, findings, names)
        with findings.part("the batch sizes behind the first"):
            await server.until(
                "background compilation finished" if not place.quick else "model loaded", len(names)
            )
        for row in server.events("model loaded", "background compilation finished"):
            shown = {key: row.get(key) for key in ("event", "compile_seconds", "size_bytes")}
            findings.add(f"model: {row['model']}", **shown)
        findings.add("memory of the server", card_bytes=card_bytes() - used)
        findings.add("warnings", said=server.warnings()[:6])
        for batch, concurrency in ((1, "1,32"), (32, "4")):
            with findings.part("bench"):
                await asyncio.to_thread(server.bench, "mlp", batch, concurrency)
    with findings.part("start again"):
        async with Server(place, findings, folder, cache=cache) as server:
            loads = {row["model"]: row["cached_programs"] for row in server.events("model loaded")}
            seconds = server.ready_seconds
            findings.add("ready, all compiled before", seconds=seconds, cached_programs=loads)


async def _answers(server: Server, findings: Findings, names: tuple[str, ...]) -> None:
    from gpu_check.device import Device, inputs_of

    cpu = Device.started("cpu")
    for name in names:
        with findings.part(f"answers over gRPC: {name}"):
            reference = cpu.load(EXAMPLES / name / "1", name, on="cpu")
            specs = {spec.name: spec for spec in await server.client.inputs(name)}
            for rows in (1, 3, 8):
                inputs = inputs_of(reference, rows)
                given = [(specs[key], value) for key, value in inputs.items()]
                result = await server.client.infer(name, "", given)
                for key, value in reference.execute(inputs).items():
                    findings.answer(
                        f"answers over gRPC: {name}", result.outputs[key], value, depth=4,
                        rows=rows, output=key,
                    )  # fmt: skip
            reference.close()


def precision(place: Place, findings: Findings) -> None:
    """Compare answers at each precision of FP32 products with those of numpy in FP64."""
    import xlaserve

    path = place.folder / "precision" / "product" / "1"
    w = np.random.default_rng(1).standard_normal((512, 512)).astype(np.float32)
    platforms = list(dict.fromkeys(("cpu", place.device)))
    xlaserve.export_model(
        lambda p, x: {"y": x @ p["w"]}, {"w": w}, {"x": ("FP32", [-1, 512])}, path,
        max_batch_size=1, platforms=platforms, overwrite=True,
    )  # fmt: skip
    x = np.random.default_rng(2).standard_normal((1, 512)).astype(np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64)

    async def ask(word: str) -> None:
        flags = ("--matmul-precision", word)
        async with Server(place, findings, path.parents[1], *flags) as server:
            (spec,) = await server.client.inputs("product")
            result = await server.client.infer("product", "", [(spec, x)])
            said = (await server.client.describe("product", "")).get("parameters")
            at_most = 1e-5 if word == "highest" else 8e-3
            off = far(result.outputs["y"], exact)
            findings.add(f"matmul_precision {word}", relative=off, at_most=at_most, said=said)

    for word in ("default", "highest"):
        with findings.part(f"matmul_precision {word}"):
            asyncio.run(ask(word))


def sequences(place: Place, findings: Findings) -> None:
    """Check stateful sequences, a tiny generator, and embeddings."""
    folder = repository(place, "sequences", "sequence", "tiny", "embedding")

    async def run() -> None:
        async with Server(place, findings, folder) as server:
            findings.add("loaded", warnings=server.warnings()[:4])
            with findings.part("sequence"):
                await _sequence(server, findings)
            with findings.part("tiny generator"):
                await _tiny(server, findings)
            with findings.part("embedding"):
                await asyncio.to_thread(_embedding, server, findings)

    asyncio.run(run())


async def _sequence(server: Server, findings: Findings) -> None:
    from xlaserve.serving.inference import InferInput, InferRequest
    from xlaserve.tensors import datatype_named

    series = [1.0, 3.0, -2.0, 8.0]
    expected, found = [], []
    for scale in (1.0, 2.0):
        level = 0.0
        for step, x in enumerate(series):
            level = x * scale if step == 0 else 0.9 * level + 0.1 * x * scale
            value = np.array([[x * scale]], np.float32)
            told = {
                "sequence_id": int(scale),
                "sequence_start": step == 0,
                "sequence_end": step == len(series) - 1,
            }
            given = (InferInput("x", datatype_named("FP32"), value),)
            asked = InferRequest("sequence", inputs=given, parameters=told)
            answer = await server.client.ask(asked)
            found.append(np.asarray(answer.outputs["y"]).reshape(-1)[0])
            expected.append(level)
    findings.answer("sequence", found, np.array(expected, np.float32))


async def _tiny(server: Server, findings: Findings) -> None:
    from support import tiny_language

    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    got = await _tokens(server.client, "tiny", np.array(prompt, np.int32), 20)
    wanted = tiny_language.greedy(prompt, 20)
    same = [one for one, _ in got] == wanted[-len(got) :]
    findings.add("tiny generator", same=same, got=len(got))


async def _tokens(client: Any, model: str, prompt: Any, most: int) -> list[tuple[int, float]]:
    """Return the tokens of one request, and the arrival time of each."""
    from xlaserve.serving.inference import InferInput, InferRequest
    from xlaserve.tensors import datatype_named

    given = (InferInput("tokens", datatype_named("INT32"), prompt),)
    told = {"max_tokens": most, "ignore_eos": True}
    asked = InferRequest(model, inputs=given, parameters=told)
    found = []
    async for one in client.stream(asked, 120):
        if "token" in one.outputs:
            found.append((int(one.outputs["token"][0]), time.perf_counter()))
    return found


def _embedding(server: Server, findings: Findings) -> None:
    from support import tiny_embedding

    tokens = [1, 2, 3]
    asked = urllib.request.Request(
        f"http://{server.http}/v1/embeddings",
        json.dumps({"model": "embedding", "input": tokens}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        found = np.array(json.load(answer)["data"][0]["embedding"], np.float32)
    wanted = tiny_embedding.expected(tokens)
    # The embeddings may or may not be normalised, so compare directions only.
    found, wanted = (one / np.linalg.norm(one) for one in (found, wanted))
    findings.answer("embedding", found, wanted, depth=2)


def served_speed(place: Place, findings: Findings) -> None:
    """Measure two models over gRPC: one at a time, both together, and while another one loads."""
    asyncio.run(_served_speed(place, findings))


async def _served_speed(place: Place, findings: Findings) -> None:
    names = ("resnet50_bf16", "bert_bf16")
    folder = repository(place, "speed", *names)
    async with Server(place, findings, folder) as server:
        loaded = [(row["model"], row["cached_programs"]) for row in server.events("model loaded")]
        findings.add("ready", seconds=server.ready_seconds, models=loaded)
        for name in names:
            for batch, concurrency in ((1, "1"), (1, "64"), (place.batches[-2], "8")):
                with findings.part(f"grpc {name}"):
                    await asyncio.to_thread(server.bench, name, batch, concurrency, 1.5)
        with findings.part("both at once"):
            benches = [
                asyncio.to_thread(server.bench, name, place.batches[-2], "4") for name in names
            ]
            await asyncio.gather(*benches)
        ends = time.monotonic() + place.seconds
        latency = await _latency(server, lambda: time.monotonic() > ends)
        findings.add("alone", latency_ms=latency)
    with findings.part("beside a load"):
        flags = ("--model-control-mode", "explicit", "--load-model", "bert_bf16")
        cache = place.folder / "cache.fresh"
        async with Server(place, findings, folder, *flags, cache=cache) as server:
            loading = asyncio.ensure_future(server.client.load("resnet50_bf16"))
            latency = await _latency(server, loading.done)
            findings.add("while another model loads and compiles", latency_ms=latency)
            await loading


async def _latency(server: Server, until: Callable[[], bool]) -> dict[str, float]:
    (spec,) = await server.client.inputs("bert_bf16")
    shape = [1 if size == -1 else size for size in spec.shape]
    value = np.ones(shape, spec.datatype.dtype)
    times: list[float] = []
    while len(times) < 20 or not until():
        began = time.perf_counter()
        await server.client.infer("bert_bf16", "", [(spec, value)])
        times.append(1e3 * (time.perf_counter() - began))
    p99 = statistics.quantiles(times, n=100)[-1]
    found = {"p50": statistics.median(times), "p99": p99, "max": max(times), "count": len(times)}
    return {key: round(value, 2) for key, value in found.items()}


def generate(place: Place, findings: Findings) -> None:
    """Measure the tokens per second of a 1.2B Llama, relative to the limit of memory bandwidth."""
    asyncio.run(_generate(place, findings, "llama"))


def weights(place: Place, findings: Findings) -> None:
    """Measure the same with quantised matrices."""
    for name in ("llama_int8",) if place.quick else ("llama_int8", "llama_int4"):
        with findings.part(name):
            asyncio.run(_generate(place, findings, name))


async def _generate(place: Place, findings: Findings, name: str) -> None:
    folder = repository(place, f"generate.{name}", name)
    vocab, prompt, answer = (512, 16, 8) if place.quick else (128_256, 128, 128)
    size = (folder / name / "1" / "params.safetensors").stat().st_size
    # A step reads only single rows of the embedding table.
    read = size - vocab * (64 if place.quick else 2048) * 2
    bandwidth = findings.earlier("env", "copy on device").get("gb_per_second", 0) * 1e9
    async with Server(place, findings, folder) as server:
        said = server.events("model loaded")
        findings.add("ready", seconds=server.ready_seconds, loaded=said, card_bytes=card_bytes())

        async def one(number: int) -> tuple[float, list[float]]:
            tokens = np.random.default_rng(number).integers(10, vocab, prompt).astype(np.int32)
            began = time.perf_counter()
            return began, [at for _, at in await _tokens(server.client, name, tokens, answer)]

        await one(0)
        for many in (1, 4) if place.quick else (1, 8, 32, 64):
            with findings.part(f"{many} side by side"):
                began = time.perf_counter()
                got = await asyncio.gather(*(one(1000 * many + index) for index in range(many)))
                seconds = time.perf_counter() - began
                gaps = sorted(b - a for _, at in got for a, b in pairwise(at))
                first = statistics.median(at[0] - start for start, at in got)
                findings.add(
                    f"{name}, {many} side by side",
                    tokens_per_second=round(sum(len(at) for _, at in got) / seconds, 1),
                    step_ms=round(1e3 * statistics.median(gaps), 3),
                    p99_ms=round(1e3 * gaps[int(len(gaps) * 0.99)], 3),
                    first_token_ms=round(1e3 * first, 1), parameter_bytes=read,
                    least_step_ms=round(1e3 * read / bandwidth, 3) if bandwidth else None,
                )  # fmt: skip


def churn(place: Place, findings: Findings) -> None:
    """Load and unload up to 500 times, and report the memory left on the card and on the host."""
    asyncio.run(_churn(place, findings))


async def _churn(place: Place, findings: Findings) -> None:
    names = ("mlp",) if place.quick else ("mlp", "digits", "simple")
    folder = repository(place, "churn", *names)
    async with Server(place, findings, folder, "--model-control-mode", "explicit") as server:

        async def once(name: str) -> tuple[float, float]:
            began = time.perf_counter()
            await server.client.load(name)
            middle = time.perf_counter()
            await server.client.unload(name)
            return middle - began, time.perf_counter() - middle

        for name in names:
            await once(name)
        card, host = card_bytes(), _resident(server)
        times: list[tuple[float, float]] = []
        until = time.monotonic() + (1 if place.quick else _CHURN_SECONDS)
        while time.monotonic() < until and len(times) < _MOST_LOADS:
            times.append(await once(names[len(times) % len(names)]))
            if len(times) % 50 == 0:
                grown = _resident(server) - host
                findings.add("so far", loads=len(times), card=card_bytes() - card, host=grown)
        loads, unloads = zip(*times, strict=True)
        findings.add(
            "loads and unloads", count=len(times), host_grown=_resident(server) - host,
            load_ms=round(1e3 * statistics.median(loads), 1), card_grown=card_bytes() - card,
            unload_ms=round(1e3 * statistics.median(unloads), 1),
        )  # fmt: skip


def _resident(server: Server) -> int:
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


def preallocation(place: Place, findings: Findings) -> None:
    """Start with the card's memory preallocated, and allocated on demand."""

    async def run(value: str) -> None:
        folder = repository(place, "preallocation", "mlp")
        used = card_bytes()
        async with Server(place, findings, folder, XLA_PYTHON_CLIENT_PREALLOCATE=value) as server:
            await asyncio.to_thread(server.bench, "mlp", 1, "1", 0.5)
            findings.add(
                f"preallocation {value}", seconds=server.ready_seconds,
                card_bytes=card_bytes() - used, warnings=server.warnings()[:3],
            )  # fmt: skip

    for value in ("false", "true"):
        with findings.part(f"preallocation {value}"):
            asyncio.run(run(value))


def ahead(place: Place, findings: Findings) -> None:
    """Start with a cache filled by `warm --target`, and count how many of its programs are used."""
    import subprocess
    import sys

    row = findings.earlier("env", "device")
    target = "cpu" if place.device == "cpu" else row.get("target")
    if not target:
        findings.add("made ahead", skipped=f"no target is named for {row.get('kind')}")
        return
    folder, cache = repository(place, "ahead", "mlp"), place.folder / "cache.ahead"
    command = [sys.executable, "-m", "xlaserve", "warm", str(folder), "--target", str(target)]
    began = time.monotonic()
    ran = subprocess.run(
        [*command, "--cache", str(cache)], capture_output=True, text=True, check=False
    )
    seconds = round(time.monotonic() - began, 2)
    findings.add("warm", code=ran.returncode, same=ran.returncode == 0, seconds=seconds,
                 said=(ran.stdout + ran.stderr)[-400:])  # fmt: skip

    async def run() -> None:
        async with Server(place, findings, folder, cache=cache) as server:
            (row,) = server.events("model loaded")
            findings.add(
                "made ahead", seconds=server.ready_seconds, cached=row.get("cached_programs"),
                compiled=row.get("compile_seconds"), warnings=server.warnings()[:3],
            )  # fmt: skip

    asyncio.run(run())
