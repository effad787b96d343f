"""The version policy of a configuration, as Triton means it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support.server import RunningServer, Serve
from tritonclient.utils import InferenceServerException

TENSORS = """
    backend: "identity"
    input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
    output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
THERE = ("1", "2", "3", "10", "0", "007", "latest", "-1", "2.5", ".4")

POLICIES = {
    "": ["10"],
    "latest { }": ["10"],
    "latest { num_versions: 1 }": ["10"],
    "latest { num_versions: 3 }": ["2", "3", "10"],
    "latest { num_versions: 99 }": ["1", "2", "3", "10"],
    "all { }": ["1", "2", "3", "10"],
    "specific { versions: [ 1, 3 ] }": ["1", "3"],
    "specific { versions: [ 3, 3, 77 ] }": ["3"],
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model of several versions, among directories that are none."""
    for name in THERE:
        (tmp_path / "models/m" / name).mkdir(parents=True)
    return tmp_path / "models"


@pytest.fixture
async def served(serve: Serve, repository: Path) -> AsyncIterator[tuple[RunningServer, Any]]:
    async with (
        serve(repository) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        yield server, client


def write(repository: Path, policy: str) -> None:
    text = f"{TENSORS} version_policy {{ {policy} }}" if policy else TENSORS
    (repository / "m/config.pbtxt").write_text(text)


async def answering(client: Any, version: str = "") -> str:
    tensor = triton.InferInput("x", [1], "FP32")
    tensor.set_data_from_numpy(np.ones(1, np.float32))
    answer: Any = await client.infer("m", [tensor], version)
    return str(answer.get_response().model_version)


async def versions(client: Any) -> list[str]:
    return list((await client.get_model_metadata("m")).versions)


async def test_each_policy_serves_its_versions_and_no_other(
    served: tuple[RunningServer, Any], repository: Path
) -> None:
    """Without a version the newest of them answers. Each reload takes the others away."""
    _, client = served
    for policy, expected in POLICIES.items():
        write(repository, policy)
        await client.load_model("m")
        index = await client.get_model_repository_index()
        ready = [row.version for row in index.models if row.state == "READY"]

        assert expected == await versions(client), policy
        assert expected == sorted(ready, key=int), policy
        assert expected[-1] == await answering(client), policy
        assert expected == [await answering(client, version) for version in expected], policy
        for version in {"1", "2", "3", "10"} - set(expected):
            with pytest.raises(InferenceServerException, match="m"):
                await answering(client, version)


async def test_a_policy_that_picks_nothing_fails_the_load(
    served: tuple[RunningServer, Any], repository: Path
) -> None:
    _, client = served
    write(repository, "specific { versions: [ 77 ] }")
    with pytest.raises(
        InferenceServerException,
        match="no version directory matches its version_policy: change the policy, or add a"
        " version to",
    ):
        await client.load_model("m")


async def test_a_newer_version_takes_the_place_of_the_latest(
    serve: Serve, repository: Path
) -> None:
    """While the repository is polled."""
    write(repository, "latest { num_versions: 2 }")
    async with (
        serve(repository, model_control_mode="poll", poll_interval_seconds=3600) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        seen = [await versions(client)]
        (repository / "m/11").mkdir()
        (repository / "m/11/file").write_text("")
        await server.application.control.follower.poll()
        seen.append(await versions(client))
        (repository / "m/11").rename(repository / "m/.11")
        await server.application.control.follower.poll()
        seen.append(await versions(client))

    assert [["3", "10"], ["10", "11"], ["3", "10"]] == seen
