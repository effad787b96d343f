"""Servers that share compiled programs in an S3 bucket."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.asking import client
from support.compilations import noted_compilations
from support.hanging_port import hanging_port
from support.object_server import serving_objects
from support.s3 import BUCKET, serving_bucket
from support.server import RunningServer, Serve
from typer.testing import CliRunner

import xlaserve
from xlaserve import cli

# The SDK leaves connections to the garbage collector.
pytestmark = [
    pytest.mark.slow,  # importing the server and the SDK takes seconds
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]

URL = f"s3://{BUCKET}/programs"
PROGRAMS = 2
X = np.ones((2, 3), np.float32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with one model, which doubles, and two batch sizes."""
    root = tmp_path_factory.mktemp("models")
    inputs = {"x": ("FP32", [-1, 3])}
    xlaserve.export_model(
        lambda p, x: x * 2.0, None, inputs, root / "double" / "1", outputs=["y"], max_batch_size=2
    )
    return root


@pytest.fixture
def bucket() -> Iterator[Any]:
    with serving_bucket({}) as made:
        yield made
        # Servers in one process share the bucket.
        made.delete_bucket_policy(Bucket=BUCKET)
        for name in objects(made):
            made.delete_object(Bucket=BUCKET, Key=name)


class Started:
    """Starts servers that share programs, each with its own cache directory."""

    def __init__(self, serve: Serve, models: Path, scratch: Path) -> None:
        self._serve, self._models, self._scratch = serve, models, scratch
        self._count = 0

    async def compiled(self, url: str = URL, **settings: Any) -> tuple[int, int]:
        """Start a server, load, infer; return the counts of compilations and programs."""
        self._count += 1
        more = {
            "compilation_cache_url": url,
            "remote_schemes": (url.partition(":")[0],),
            "compilation_cache_directory": str(self._scratch / f"cache{self._count}"),
            **settings,
        }
        async with self._serve(self._models, **more) as server, client(server) as asking:
            with noted_compilations() as compiled:
                await asking.grpc.load_model("double")
                answer = await asking.infer("double", x=X)
            self.check(server)
            if "http_endpoint" in settings:
                self.metrics = programs_of(await asking.metrics())
        assert np.array_equal(2 * X, answer["y"])
        return len(compiled), self.cached

    def check(self, server: RunningServer) -> None:
        _, instance = server.application.registry.resolve("double")
        self.cached = instance.info.cached_programs
        store = server.application.compilation.store
        assert store is not None
        assert store.flush(60)
        self.written = store.counts.written
        self.hits, self.unusable = store.counts.hits, store.counts.unusable


@pytest.fixture
def started(serve: Serve, models: Path, tmp_path: Path) -> Started:
    return Started(serve, models, tmp_path)


def programs_of(metrics: str) -> dict[str, float]:
    """Return the program metrics by name, without the common prefix."""
    rows = re.findall(r"^xlaserve_program_(.*) (\S+)$", metrics, re.MULTILINE)
    return {name: float(value) for name, value in rows}


def lookups(of: dict[str, float], place: str) -> dict[str, float]:
    """Return the lookups in a store or cache by outcome, omitting zeros."""
    prefix = f'lookups_total{{place="{place}",outcome="'
    found = {name.removeprefix(prefix): value for name, value in of.items()}
    return {
        name.removesuffix('"}'): value
        for name, value in found.items()
        if value and f"{prefix}{name}" in of
    }


def objects(bucket: Any) -> dict[str, bytes]:
    listed = bucket.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    names = [one["Key"] for one in listed]
    return {name: bucket.get_object(Bucket=BUCKET, Key=name)["Body"].read() for name in names}


async def test_what_one_server_compiled_the_next_one_finds(started: Started, bucket: Any) -> None:
    """With separate directories or none; a third server finds them in its directory."""
    first = await started.compiled()
    there = objects(bucket)
    second = await started.compiled()
    without = await started.compiled(compilation_cache_directory="none")
    written = started.written
    bucket.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": name} for name in there]})
    directory = str(started._scratch / "cache2")
    third = await started.compiled(compilation_cache_directory=directory)

    assert first[0] >= PROGRAMS
    assert (0, PROGRAMS) == second == without == third
    assert PROGRAMS == len(there)
    assert 0 == written
    assert all(name.startswith("programs/cpu-") for name in there)


async def test_metrics_say_where_programs_came_from(started: Started, bucket: Any) -> None:
    """And the number and size of programs written to each place."""
    http = {"http_endpoint": "port:0"}
    await started.compiled(**http)
    first = started.metrics
    size = first['written_bytes_total{place="store"}']
    await started.compiled(**http)
    second = started.metrics
    directory = str(started._scratch / "cache2")
    await started.compiled(compilation_cache_directory=directory, **http)
    third = started.metrics

    assert [{"miss": PROGRAMS}] * 2 == [lookups(first, place) for place in ("directory", "store")]
    assert PROGRAMS == first['writes_total{place="store",outcome="written"}']
    assert PROGRAMS == first['writes_total{place="directory",outcome="written"}']
    assert sum(map(len, objects(bucket).values())) == size
    assert ({"miss": PROGRAMS}, {"hit": PROGRAMS}) == (
        lookups(second, "directory"),
        lookups(second, "store"),
    )
    assert 0 < second['read_bytes_total{place="store"}'] < size
    assert second['read_bytes_total{place="store"}'] == third['read_bytes_total{place="directory"}']
    assert ({"hit": PROGRAMS}, {}) == (lookups(third, "directory"), lookups(third, "store"))
    assert all(one['lookup_seconds_total{place="directory"}'] > 0 for one in (first, second, third))


@pytest.mark.parametrize("change", ["bit", "cut", "other"])
async def test_damaged_program_is_compiled_and_replaced(
    started: Started, bucket: Any, capfd: pytest.CaptureFixture[str], change: str
) -> None:
    await started.compiled()
    before = objects(bucket)
    for name, data in before.items():
        at = data.index(b"\n") + 100
        damaged = {
            "bit": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
            "cut": data[:-1],
            # Intact, but written by another jaxlib.
            "other": data.replace(b'"jaxlib":"', b'"jaxlib":"9.', 1),
        }
        bucket.put_object(Bucket=BUCKET, Key=name, Body=damaged[change])
    capfd.readouterr()
    second = await started.compiled()
    printed = "".join(capfd.readouterr())
    found = started.hits, started.unusable
    third = await started.compiled()

    assert (0, PROGRAMS) == found
    assert second[0] >= PROGRAMS
    assert 0 == second[1]
    assert 1 == printed.count("cached programs not used")
    assert (0, PROGRAMS) == third


async def test_bucket_that_is_not_there_is_a_line_of_the_log(
    started: Started, bucket: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    compiled, cached = await started.compiled("s3://nothing/programs")
    printed = "".join(capfd.readouterr())

    assert compiled >= PROGRAMS
    assert 0 == cached
    assert 1 == printed.count("programs not uploaded")
    assert "it does not exist" in printed


async def test_bucket_that_cannot_be_written_is_read(
    started: Started, bucket: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:PutObject",
        "Resource": f"arn:aws:s3:::{BUCKET}/*",
    }
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    await started.compiled()
    there = objects(bucket)
    name = min(there)
    bucket.delete_object(Bucket=BUCKET, Key=name)
    bucket.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(policy))
    capfd.readouterr()
    compiled, cached = await started.compiled()
    printed = "".join(capfd.readouterr())

    assert compiled > 0
    assert PROGRAMS - 1 == cached
    assert "access is denied" in printed
    assert 1 == printed.count("programs not uploaded")
    assert name not in objects(bucket)


async def test_store_that_never_answers_delays_one_program(
    started: Started,
    bucket: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It accepts connections and never answers."""
    # Importing the SDK may take longer than the store's timeout.
    await started.compiled()
    with hanging_port() as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        compiled, cached = await started.compiled(
            compilation_cache_url_seconds=0.2, remote_stall_seconds=0.2
        )
    printed = "".join(capfd.readouterr())

    assert compiled >= PROGRAMS
    assert 0 == cached
    assert 1 == printed.count("program store paused")


async def test_web_server_is_only_read(started: Started, bucket: Any) -> None:
    await started.compiled()
    served = {f"root/{name}": data for name, data in objects(bucket).items()}
    with serving_objects(**served) as (url, shelves):
        found = await started.compiled(f"{url}/programs")
        shelves.objects.clear()
        nothing = await started.compiled(f"{url}/programs")

    assert (0, PROGRAMS) == found
    assert nothing[0] >= PROGRAMS
    assert {"GET", "HEAD"} == {method for method, _, _ in shelves.asked}


def warm(models: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.application(), ["warm", str(models), *more])
    return result.exit_code, result.output + str(result.exception or "")


@pytest.mark.parametrize("options", [(), ("--target", "cpu")])
async def test_command_fills_the_store_for_servers(
    started: Started, models: Path, bucket: Any, options: tuple[str, ...]
) -> None:
    first = warm(models, "--cache", URL, "--json", *options)
    second = warm(models, "--cache", URL, "--json", *options)
    rows = [json.loads(output.splitlines()[0]) for _, output in (first, second)]

    assert [0, 0] == [first[0], second[0]]
    assert [(2, 0), (0, 2)] == [(row["compiled"], row["cached"]) for row in rows]
    assert (0, PROGRAMS) == await started.compiled()


def test_command_fails_where_the_store_takes_nothing(models: Path, bucket: Any) -> None:
    status, output = warm(models, "--cache", "s3://nothing/programs")

    assert 0 != status
    assert "expected a store that takes 2 further programs (it does not exist)" in output


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/programs", "ftp://host/programs"])
def test_command_refuses_what_cannot_be_written(models: Path, url: str) -> None:
    status, output = warm(models, "--cache", url)

    assert 0 != status
    assert "compilation_cache_url: expected" in output
