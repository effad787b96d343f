"""Several --model-repository options, as in tritonserver."""

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc.aio as triton
import tritonclient.http.aio as triton_http
from structlog.testing import capture_logs
from support.server import RunningServer, Serve
from tritonclient.utils import InferenceServerException

from xlaserve.errors import InvalidSettings, RepositoryUnreadable
from xlaserve.residence.repository import listing
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode, Readiness

IDENTITY = """
    backend: "identity"
    input [ { name: "x" data_type: TYPE_FP32 dims: [ %d ] } ]
    output [ { name: "y" data_type: TYPE_FP32 dims: [ %d ] } ]
"""


def put(root: Path, name: str, size: int = 1) -> Path:
    """Write a model that can be recognized by its input size."""
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(IDENTITY % (size, size))
    return root / name


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Two repositories that both contain `both`."""
    one, two = tmp_path / "one", tmp_path / "two"
    put(one, "a", 1)
    put(two, "b", 2)
    put(one, "both", 3)
    put(two, "both", 4)
    return one, two


@pytest.fixture
def serve_both(serve: Serve, roots: tuple[Path, Path]) -> Callable[..., Any]:
    def serve_them(mode: ModelControlMode, **settings: Any) -> Any:
        one, two = roots
        return serve(
            one,
            model_repository=(two,),
            model_control_mode=mode,
            http_endpoint="port:0",
            **settings,
        )

    return serve_them


def ready(server: RunningServer) -> list[str]:
    registry = server.application.registry
    return [model.name for model in registry.models() if registry.ready(model.name)]


async def index(server: RunningServer) -> dict[str, tuple[str, str]]:
    assert server.http is not None
    async with triton_http.InferenceServerClient(server.http) as client:
        rows: Any = await client.get_model_repository_index()
    return {row["name"]: (row["state"], row.get("reason", "")) for row in rows}


@pytest.mark.parametrize("mode", [ModelControlMode.NONE, ModelControlMode.POLL])
async def test_a_model_in_two_of_them_is_served_from_neither(
    serve_both: Callable[..., Any], roots: tuple[Path, Path], mode: ModelControlMode
) -> None:
    reason = f"it is in several repositories, '{roots[0]}' and '{roots[1]}'"
    with capture_logs() as lines:
        async with serve_both(mode, readiness=Readiness.MODELS) as server:
            found = await index(server)
            is_ready = server.application.control.follower.server_ready

    assert {
        "a": ("READY", ""),
        "b": ("READY", ""),
        "both": ("UNAVAILABLE", f"failed to load 'both', {reason}"),
    } == found
    assert not is_ready
    assert any(line.get("reason") == reason and line["model"] == "both" for line in lines)


async def test_clients_load_from_all_of_them(serve_both: Callable[..., Any]) -> None:
    async with (
        serve_both(ModelControlMode.EXPLICIT, load_model=("b",)) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        at_start = ready(server)
        await client.load_model("a")
        with pytest.raises(InferenceServerException, match="it is in several repositories"):
            await client.load_model("both")
        with pytest.raises(InferenceServerException, match="not in the model repository"):
            await client.load_model("neither")
        found = ready(server)
        await client.unload_model("b")
        left = await index(server)

    assert (["b"], ["a", "b"]) == (at_start, found)
    assert {"a": "READY", "b": "UNAVAILABLE", "both": "UNAVAILABLE"} == {
        name: state for name, (state, _) in left.items()
    }


async def test_a_polled_model_follows_where_it_is(
    serve_both: Callable[..., Any], roots: tuple[Path, Path]
) -> None:
    """It is unloaded while two repositories contain it, and loaded again when one does."""
    one, two = roots
    async with serve_both(ModelControlMode.POLL, poll_interval_seconds=3600) as server:

        async def after(change: Callable[[], object]) -> list[tuple[str, int]]:
            change()
            await server.application.control.follower.poll()
            resolve = server.application.registry.resolve
            return [(name, resolve(name)[1].info.inputs[0].shape[0]) for name in ready(server)]

        steps: list[Awaitable[list[tuple[str, int]]]] = [
            after(lambda: shutil.rmtree(one / "both")),
            after(lambda: put(one, "b", 5)),
            after(lambda: shutil.rmtree(two / "b")),
            after(lambda: (one / "a").rename(two / "a")),
            after(lambda: two.rename(two.with_name("gone"))),
            after(lambda: two.with_name("gone").rename(two)),
            after(lambda: shutil.rmtree(two / "a")),
        ]
        found = [await step for step in steps]

    assert [
        [("a", 1), ("b", 2), ("both", 4)],
        [("a", 1), ("both", 4)],
        [("a", 1), ("b", 5), ("both", 4)],
        [("a", 1), ("b", 5), ("both", 4)],
        [("a", 1), ("b", 5), ("both", 4)],
        [("a", 1), ("b", 5), ("both", 4)],
        [("b", 5), ("both", 4)],
    ] == found


async def test_links_in_a_circle_are_skipped_by_both(
    serve_both: Callable[..., Any], roots: tuple[Path, Path]
) -> None:
    one, two = roots
    (one / "x").symlink_to(two / "x")
    (two / "x").symlink_to(one / "x")
    async with serve_both(ModelControlMode.NONE) as server:
        assert ["a", "b"] == ready(server)
        assert 2 == server.application.control.follower.watch.skipped


async def test_links_may_lead_from_one_into_another(
    serve_both: Callable[..., Any], roots: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = roots
    (one / "c").symlink_to(two / "b")
    (one / "d").symlink_to(put(tmp_path / "outside", "d"))
    async with serve_both(ModelControlMode.NONE) as server:
        assert ["a", "b", "c"] == ready(server)


async def test_the_same_directory_twice_is_refused(serve: Serve, roots: tuple[Path, Path]) -> None:
    one, _ = roots
    (one.parent / "link").symlink_to(one)
    with pytest.raises(
        InvalidSettings, match="model_repository: expected a directory not already given"
    ):
        async with serve(one, model_repository=(one.parent / "link",)):
            pass
    with pytest.raises(InvalidSettings, match="model_repository: expected a directory"):
        async with serve(one, model_repository=(one.parent / "nothing",)):
            pass


async def test_one_that_cannot_be_read_is_named(
    serve_both: Callable[..., Any], roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, two = roots

    def list_root(root: Path, **more: Any) -> Any:
        if root == two:
            raise PermissionError(13, "Permission denied")
        return listing.list_root(root, **more)

    monkeypatch.setattr("xlaserve.residence.repository.repository.list_root", list_root)
    with pytest.raises(RepositoryUnreadable, match=str(two)):
        async with serve_both(ModelControlMode.NONE):
            pass


def test_the_first_one_stands_for_the_argument() -> None:
    given = Settings.read({}, model_repository=["/a", "/b"])
    from_environment = Settings.read({"XLASERVE_MODEL_REPOSITORY": "/a,/b"}, repository="/c")

    assert (Path("/a"), (Path("/b"),)) == (given.repository, given.model_repository)
    assert Path("/c") == from_environment.repository
    assert (Path("/a"), Path("/b")) == from_environment.model_repository
