"""Steps that use the device in their own process: ceilings, memory, answers, speed."""

# jax is only partly typed.
# mypy: disallow-untyped-calls=False

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from device.findings import Findings
from device.making import LARGE, made
from device.place import EXAMPLES, Place, card_bytes
from device.server import share
from gpu_check.device import Device, calls_per_second, inputs_of, let_go
from gpu_check.tolerances import far

_PACKAGES = (
    *("xlaserve", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin"),
    *("jax-cuda12-pjrt", "libtpu", "numpy", "aiohttp", "uvloop", "grpclib", "msgspec"),
    *("nvidia-cublas", "nvidia-cudnn-cu13"),
)
_TYPES = (
    *("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
    *("FP16", "BF16", "FP32", "FP64"),
)
_DEPTHS = {"resnet18": 20, "mobilenet": 50, "yolo": 60, "encoder": 40, "linear_algebra": 100}
"""Depth of each network, in successive matrix products."""


class Here:
    """The device of this process, and models on it."""

    def __init__(self, place: Place, findings: Findings) -> None:
        self.place = place
        self.findings = findings
        self.device = Device.started(place.device)
        place.cache.mkdir(mode=0o700, parents=True, exist_ok=True)

    def loaded(self, directory: Path, *, on: str = "", sizes: str = "") -> Any:
        """Load a model as a server does, with the compilation cache shared by all steps."""
        from xlaserve.model_config.config import ModelConfig
        from xlaserve.runtime import loaders
        from xlaserve.runtime.load_context import LoadContext
        from xlaserve.runtime.programs import compilation
        from xlaserve.settings import Settings

        settings = Settings.read(
            {}, repository=directory, compilation_cache_directory=str(self.place.cache)
        )
        compiled = compilation.Compilation() if on else compilation.of_settings(settings)
        if compiled.cache is not None:
            from xlaserve.runtime.devices import jax_runtime

            jax_runtime.start(self.place.device, compiled.cache)
        config = ModelConfig(parameters={"batch_sizes": sizes} if sizes else {})
        name = directory.parent.name
        context = LoadContext(name, "1", config, on or self.place.device, compilation=compiled)
        return loaders.load(directory, context)

    def statistics(self) -> dict[str, int]:
        """Return the device allocator's statistics."""
        import jax

        return dict(jax.local_devices(backend=self.place.device)[0].memory_stats() or {})

    def rate(self, call: Callable[[], object]) -> float:
        """Return calls per second, without the first call."""
        call()
        return calls_per_second(call, self.place.seconds)


def env(place: Place, findings: Findings) -> None:
    """Report the environment and the limits of the device: products, copies, the smallest call."""
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    findings.add("versions", python=sys.version.split()[0], cores=os.cpu_count(), **found)
    if place.is_gpu:
        asked = "--query-gpu=name,driver_version,memory.total,memory.used,compute_mode"
        ran = subprocess.run(
            ["nvidia-smi", asked, "--format=csv,noheader"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        findings.add("nvidia-smi", said=ran.stdout.strip() or ran.stderr.strip())
    began = time.perf_counter()
    here = Here(place, findings)
    _describe(here, time.perf_counter() - began)
    with findings.part("ceilings"):
        _ceilings(here)
    with findings.part("precision"):
        _precision(findings)


def _describe(here: Here, seconds: float) -> None:
    import jax

    from xlaserve.runtime.devices import target_kinds as kinds

    present = jax.local_devices(backend=here.place.device)[0]
    kind = str(present.device_kind)
    row = next((one for one in kinds.TARGETS.values() if one.kind == kind), None)
    here.findings.add(
        "device", kind=kind, count=here.device.count, start_seconds=round(seconds, 2),
        limit_bytes=here.device.limit_bytes, target=row.name if row else None,
        target_bytes=row.memory_bytes if row else None, statistics=sorted(here.statistics()),
        version=str(present.client.platform_version)[:300], card_bytes=card_bytes(),
    )  # fmt: skip


def _timed(function: Any, *arguments: Any, times: int = 10) -> float:
    function(*arguments).block_until_ready()
    best = []
    for _ in range(5):
        began = time.perf_counter()
        out = [function(*arguments) for _ in range(times)][-1]
        out.block_until_ready()
        best.append((time.perf_counter() - began) / times)
    return median(best)


def _ceilings(here: Here) -> None:
    import jax
    import jax.numpy as jnp

    place, findings = here.place, here.findings
    device = jax.local_devices(backend=place.device)[0]
    key, n = jax.random.key(0), 128 if place.quick else 8192
    product = jax.jit(lambda a, b: a @ b)
    for dtype in (jnp.bfloat16, jnp.float32):
        a, b = (
            jax.device_put(jax.random.normal(one, (n, n), jnp.float32).astype(dtype), device)
            for one in jax.random.split(key)
        )
        tflops = 2 * n**3 / _timed(product, a, b) / 1e12
        findings.add(f"matmul {jnp.dtype(dtype).name}", n=n, tflops=round(tflops, 3))
    x = jax.device_put(np.ones(1 << (18 if place.quick else 28), np.float32), device)
    plus = jax.jit(lambda x: x + np.float32(1))
    bandwidth = 2 * x.nbytes / _timed(plus, x) / 1e9
    findings.add("copy on device", gb_per_second=round(bandwidth, 1))
    host = np.random.default_rng(0).random(1 << (16 if place.quick else 24), np.float32)
    up = here.rate(lambda: jax.device_put(host, device).block_until_ready())
    fresh = [plus(jax.device_put(host, device)).block_until_ready() for _ in range(8)]
    began = time.perf_counter()
    for one in fresh:
        np.asarray(one)
    down = 8 / (time.perf_counter() - began)
    findings.add(
        "host copies", bytes=host.nbytes, to_device_gb_s=round(up * host.nbytes / 1e9, 2),
        to_host_gb_s=round(down * host.nbytes / 1e9, 2),
    )  # fmt: skip
    small = np.ones(16, np.float32)
    micro = 1e6 / here.rate(lambda: np.asarray(plus(small)))
    findings.add("smallest call", microseconds=round(micro, 1))


def _precision(findings: Findings) -> None:
    """Report the error of FP32 products with each precision setting."""
    import jax
    import jax.numpy as jnp

    from xlaserve.runtime.devices.sites import Site
    from xlaserve.runtime.programs.compilation import XlaOptions
    from xlaserve.settings.choices import MatmulPrecision

    a, b = (np.random.default_rng(s).standard_normal((512, 512)).astype(np.float32) for s in (1, 2))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    device = jax.local_devices()[0]
    site = Site([device], platform="cuda" if device.platform == "gpu" else device.platform)
    shape = jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=site.outputs)
    for word in (MatmulPrecision.DEFAULT, MatmulPrecision.HIGH, MatmulPrecision.HIGHEST):
        lowered = jax.jit(partial(jnp.matmul)).lower(shape, shape)
        call = XlaOptions(precision=word.of_xla).compiled(lowered, site)
        at_most = 1e-5 if word is MatmulPrecision.HIGHEST else 8e-3
        findings.add(f"fp32 products, {word}", relative=far(call(a, b), exact), at_most=at_most)


def sizes(place: Place, findings: Findings) -> None:
    """Compare reserved memory with actual use, by increasing peak: peaks only grow."""
    here = Here(place, findings)
    names = ["mlp"] if place.smoke else ["mlp", "resnet18", "resnet50_bf16", "bert", "bert_bf16"]
    for name in names:
        if place.quick and name in LARGE:
            continue
        with findings.part(f"bytes: {name}"):
            _bytes_of(here, name)


def _bytes_of(here: Here, name: str) -> None:
    from gpu_check.overlap import Line

    example = EXAMPLES / name / "1"
    directory = example if example.exists() else made(here.place, name) / "1"
    batches = "" if example.exists() else ",".join(map(str, here.place.batches))
    used, card = here.device.bytes_in_use(), card_bytes()
    began = time.perf_counter()
    model = here.loaded(directory, sizes=batches)
    seconds = time.perf_counter() - began
    grown, before = here.device.bytes_in_use() - used, here.statistics().get("peak_bytes_in_use", 0)
    inputs = inputs_of(model, model.info.buckets[-1].rows)
    if model.dispatching is not None:
        line = Line(here.device, model.dispatching, inputs, 2)
        asyncio.run(line.executions_per_second(here.place.seconds / 2))
    peak = here.statistics().get("peak_bytes_in_use", 0)
    held, driver = model.info.memory, card_bytes() - card
    let_go(model)
    left = here.device.bytes_in_use() - used
    here.findings.add(
        f"bytes: {name}", load_seconds=round(seconds, 2), booked=held.total_bytes,
        compile_seconds=round(model.info.compile_seconds, 2), parameters=held.parameters_bytes,
        temporaries=held.temporaries_bytes, executables=held.executables_bytes,
        constants=held.constants_bytes, grown=grown, peak=peak - used, peak_is_new=peak > before,
        booked_over_peak=round(held.total_bytes / max(1, peak - used), 3), card_grown=driver,
        left=left if here.device.limit_bytes else None,
    )  # fmt: skip


def answers(place: Place, findings: Findings) -> None:
    """Compare datatypes, networks, imported models and linear algebra with this process's CPU."""
    import xlaserve

    here = Here(place, findings)
    for name in _TYPES:
        with findings.part(f"answers: {name}"):
            path = place.folder / "types" / name / "1"
            xlaserve.export_model(
                _of_type, None, {"x": (name, [-1, 16])}, path, max_batch_size=2, overwrite=True
            )
            _compare(here, name, path, "1,2")
    with findings.part("not a number"):
        _not_a_number(here)
    for name in (*LARGE, "encoder", "pt2", "linear_algebra"):
        if place.quick and name in LARGE:
            continue
        with findings.part(f"answers: {name}"):
            batches = ",".join(map(str, place.batches[:2])) if name == "linear_algebra" else "1,8"
            _compare(here, name, made(place, name) / "1", "" if name == "pt2" else batches)


def _of_type(params: Any, x: Any) -> dict[str, Any]:
    import jax.numpy as jnp

    if x.dtype == np.bool_:
        return {"y": ~x, "z": x & x[:, ::-1]}
    two = jnp.asarray(2, x.dtype)
    return {"y": x * two + x, "z": x[:, :8] @ jnp.ones((8, 4), x.dtype), "s": jnp.sort(x, axis=1)}


def _compare(here: Here, name: str, directory: Path, sizes: str) -> None:
    model = here.loaded(directory, sizes=sizes)
    reference = here.loaded(directory, on="cpu", sizes=sizes)
    for rows in (bucket.rows for bucket in model.info.buckets):
        inputs = inputs_of(model, rows)
        found, wanted = model.execute(inputs), reference.execute(inputs)
        for output, value in wanted.items():
            here.findings.answer(
                f"answers: {name}", found[output], value, depth=_DEPTHS.get(name, 1),
                rows=rows, output=output,
            )  # fmt: skip
    let_go(model)
    let_go(reference)


def _not_a_number(here: Here) -> None:
    import jax.numpy as jnp

    import xlaserve

    path = here.place.folder / "types" / "nan" / "1"
    xlaserve.export_model(
        lambda p, x: {"y": jnp.log(x)}, None, {"x": ("FP32", [-1, 2])}, path, max_batch_size=1,
        overwrite=True,
    )  # fmt: skip
    model = here.loaded(path)
    found = np.asarray(model.execute({"x": np.array([[0.0, -1.0]], np.float32)})["y"])
    same = bool(np.isneginf(found[0, 0]) and np.isnan(found[0, 1]))
    here.findings.add("not a number", same=same, said=str(found.tolist()))
    let_go(model)


def speed(place: Place, findings: Findings) -> None:
    """Measure direct calls of a jitted function, and the model in the server's execution path."""
    here = Here(place, findings)
    for name in ("resnet50_bf16", "bert_bf16"):
        with findings.part(f"direct {name}"):
            _speed_of(here, name)


def _speed_of(here: Here, name: str) -> None:
    import jax

    from gpu_check.overlap import Line
    from xlaserve.artifact import artifact, manifest
    from xlaserve.runtime.devices import sites
    from xlaserve.runtime.devices.device_parameters import DeviceParameters
    from xlaserve.runtime.devices.placement import Placement

    place = here.place
    directory = made(place, name) / "1"
    described = manifest.read(directory)
    exported = artifact.read(directory, described)
    (site,) = sites.layout(Placement(here.device.platform)).sites
    parameters = DeviceParameters.read(directory, described, [site], lambda: None)
    leaves = jax.device_put(list(parameters.packing.unpack(parameters.leaves[0])), site.outputs)

    @jax.jit
    def bare(*arrays: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(exported.in_tree, arrays)
        return jax.tree.leaves(exported.call(*args, **kwargs))

    def burst(there: list[Any], times: int = 4 if place.quick else 20) -> float:
        began = time.perf_counter()
        out = [bare(*leaves, *there) for _ in range(times)][-1]
        jax.block_until_ready(out)
        return times / (time.perf_counter() - began)

    model = here.loaded(directory, sizes=",".join(map(str, place.batches)))
    for rows in place.batches:
        inputs = inputs_of(model, rows)
        values = [inputs[spec.name] for spec in described.inputs]
        there = jax.device_put(values, site.outputs)
        burst(there)
        resident = burst(there)
        whole = here.rate(lambda values=values: [np.asarray(one) for one in bare(*leaves, *values)])  # type: ignore[misc]
        executed = here.rate(lambda inputs=inputs: model.execute(inputs))  # type: ignore[misc]
        piped = 0.0
        if model.dispatching is not None:
            line = Line(here.device, model.dispatching, inputs, 2)
            piped = asyncio.run(line.executions_per_second(place.seconds / 2))
        here.findings.add(
            f"direct {name}", batch=rows, inputs_on_device_rows=round(resident * rows, 1),
            jit_in_a_loop_rows=round(whole * rows, 1), execute_rows=round(executed * rows, 1),
            two_in_flight_rows=round(piped * rows, 1), latency_ms=round(1e3 / whole, 3),
            **share(place, here.findings, name, resident * rows),
        )  # fmt: skip
    let_go(model)
