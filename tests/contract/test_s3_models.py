"""Models in an S3 bucket, in a whole server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.asking import client
from support.http import ask
from support.s3 import BUCKET, S3_FAILURES, failing_bucket, serving_bucket
from support.server import RunningServer, Serve

from xlaserve.settings.choices import ModelControlMode
from xlaserve.storage import fetching
from xlaserve.storage.fsspec_store import FsspecStore
from xlaserve.storage.objects import StoreProblem

# The SDK leaves connections to the garbage collector.
pytestmark = [
    pytest.mark.slow,  # importing the server and the SDK takes seconds
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
]

MODEL = "simple"
LARGE = bytes(range(256)) * (80 << 10)


@pytest.fixture(scope="module")
def bucket(example_models: Path) -> Iterator[Any]:
    root = example_models / MODEL
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    objects = {f"models/{MODEL}/{path.relative_to(root)}": text for path, text in files.items()}
    config = f"models/{MODEL}/config.pbtxt"
    objects[config] = objects[config].replace(b"max_batch_size: 8", b"max_batch_size: 1")
    # Consoles create such an object for a directory.
    objects["models/"] = b""
    objects["other/large"] = LARGE
    with serving_bucket(objects) as made:
        yield made


async def says(server: RunningServer, action: str, model: str = MODEL) -> tuple[int, str]:
    path = f"/v2/repository/models/{model}/{action}"
    answer = await ask(server.http or "", "POST", path, body=b"{}")
    return answer.status, answer.body.decode()


def settings_of(tmp_path: Path, bucket: str = BUCKET) -> dict[str, Any]:
    return {
        "repository": f"s3://{bucket}/models",
        "http_endpoint": "port:0",
        "remote_schemes": ("s3",),
        "remote_cache_directory": str(tmp_path / "cache"),
    }


async def test_a_bucket_is_a_repository(serve: Serve, bucket: Any, tmp_path: Path) -> None:
    """Listed, loaded over gRPC and REST, served, reloaded when an ETag changes, and unloaded."""
    settings = settings_of(tmp_path)
    ones = np.ones((1, 16), np.int32)
    async with serve(**settings) as server, client(server) as asking:
        counts = server.application.repository.remotes.counts
        assert counts is not None
        answer: Any = await asking.grpc.get_model_repository_index()
        index = answer.models
        assert [(MODEL, "UNAVAILABLE")] == [(row.name, row.state) for row in index]
        assert 0 == counts.fetched_bytes
        await asking.grpc.load_model(MODEL)
        found = await asking.infer(MODEL, INPUT0=7 * ones, INPUT1=3 * ones)
        assert 10 == found["OUTPUT0"][0, 0]
        assert 1 == counts.models
        assert (200, "{}") == await says(server, "load")
        assert 1 == counts.models
        config = f"models/{MODEL}/config.pbtxt"
        text = bucket.get_object(Bucket=BUCKET, Key=config)["Body"].read()
        bucket.put_object(Bucket=BUCKET, Key=config, Body=text + b"# changed\n")
        assert (200, "{}") == await says(server, "load")
        assert 2 == counts.models
        await asking.infer(MODEL, INPUT0=ones, INPUT1=ones)
        assert (200, "{}") == await says(server, "unload")
        assert 404 == (await says(server, "load", "nothing"))[0]
    async with serve(**settings, model_control_mode=ModelControlMode.POLL) as server:
        counts = server.application.repository.remotes.counts
        assert counts is not None
        ready = await ask(server.http or "", "GET", f"/v2/models/{MODEL}/ready")
        assert 200 == ready.status
        await server.application.control.follower.poll()
        assert (0, 0) == (counts.models, counts.fetched_bytes)


async def test_a_bucket_that_is_not_there_is_named(
    serve: Serve, bucket: Any, tmp_path: Path
) -> None:
    async with serve(**settings_of(tmp_path, "nothing")) as server:
        status, text = await says(server, "load")

    assert 400 <= status
    said = "s3://nothing/models/simple cannot be read: it does not exist"
    assert said in json.loads(text)["error"]


OBJECT = f"{BUCKET}/models/{MODEL}/1/params.safetensors"
REQUESTS = {"page": ("GET", "listing"), "mark": ("HEAD", OBJECT), "object": ("GET", OBJECT)}


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(failure, kind) for failure, row in S3_FAILURES.items() for kind in sorted(row.of)],
)
async def test_a_load_meets_each_failure_of_a_bucket(
    serve: Serve,
    bucket: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: str,
    kind: str,
) -> None:
    """Requests are retried where that may help; the failure is reported and counted."""
    monkeypatch.setattr(fetching, "_FIRST_PAUSE_SECONDS", 0.001)
    row, asked = S3_FAILURES[failure], REQUESTS[kind]
    with failing_bucket() as shelves:
        shelves.failure = row.answer
        async with serve(**settings_of(tmp_path)) as server:
            counts = server.application.repository.remotes.counts
            assert counts is not None
            shelves.failing[asked] = 1000
            status, text = await says(server, "load")
            tried = 1000 - shelves.failing[asked]
            assert row.status == status, text
            assert row.text in json.loads(text)["error"]
            # Headers are read before the fetch, whose last request confirms the mark.
            assert (kind == "mark", row.status == 503) == (counts.failures, counts.refused)
            attempts = fetching.ATTEMPTS if kind in row.again else 1
            assert attempts - 1 == counts.retries
            # aiohttp repeats a GET or HEAD once if its connection breaks before the answer.
            assert tried == attempts * (2 if failure == "reset" else 1)

            shelves.failing[asked] = tried - 1 if kind in row.again else 1
            status, text = await says(server, "load")
            assert (200 if kind in row.again else row.status) == status, text
            shelves.failing.clear()
            assert (200, "{}") == await says(server, "load")


def test_a_large_object_is_read_in_ranges(bucket: Any) -> None:
    store = FsspecStore.open("s3", f"{BUCKET}/other", seconds=30, max_objects=10)
    (found,) = store.objects()

    assert ("large", len(LARGE)) == (found.name, found.size_bytes)
    assert LARGE == b"".join(store.read(found, 0, len(LARGE)))
    assert LARGE[1000:9_000_000] == b"".join(store.read(found, 1000, 9_000_000))
    store.confirm(found)


def test_wrong_credentials_are_not_repeated(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = FsspecStore.open("s3", f"{BUCKET}/other", seconds=30, max_objects=10)

    with pytest.raises(StoreProblem, match="^the SDK found no credentials in its environment$"):
        store.objects()
