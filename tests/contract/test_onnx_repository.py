"""A Triton repository of ONNX models, served unchanged: converted at the first load."""

import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")

import tritonclient.grpc.aio as triton
import tritonclient.http.aio as triton_http
from onnx import TensorProto
from support.onnx_models import model, node, save
from support.server import RunningServer, Serve
from tritonclient.utils import InferenceServerException

from xlaserve.files.temporary import TemporaryDirectory
from xlaserve.importers.onnx import importing
from xlaserve.runtime.programs import conversions as kept

# Conversions are cached with compiled programs: do not reuse those of other tests.
pytestmark = pytest.mark.usefixtures("compilations")

FLOAT = TensorProto.FLOAT

ADDING = """
    name: "adds"
    platform: "onnxruntime_onnx"
    max_batch_size: 4
    input [ { name: "a" data_type: TYPE_FP32 dims: [ 3 ] } ]
    input [ { name: "b" data_type: TYPE_FP32 dims: [ 3 ] } ]
    output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
    dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 100 }
"""


def put(root: Path, name: str, made: Any, config: str = "", file: str = "1/model.onnx") -> Path:
    """Write a model in the layout of Triton's repositories; return its directory."""
    path = root / name / file
    path.parent.mkdir(parents=True, exist_ok=True)
    save(made, path.parent, path.name)
    if config:
        (root / name / "config.pbtxt").write_text(config)
    return root / name


def adding(shape: tuple[int | str, ...] = ("n", 3), operator: str = "Add") -> Any:
    """Return a model with two inputs."""
    return model([node(operator, ["a", "b"], ["y"])], dict.fromkeys("ab", (FLOAT, shape)), ["y"])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model with its configuration."""
    root = tmp_path / "models"
    put(root, "adds", adding(), ADDING)
    return root


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
async def serve_kept(serve: Serve, cache: Path) -> Callable[..., Any]:
    def serve_it(repository: Path, **settings: Any) -> Any:
        defaults = {"compilation_cache_directory": str(cache), "model_control_mode": "none"}
        return serve(repository, **defaults | settings)

    return serve_it


@pytest.fixture
async def empty(serve: Serve, tmp_path: Path) -> AsyncIterator[tuple[Path, Any]]:
    """A server with an empty repository and explicit loads, and a client."""
    root = tmp_path / "models"
    root.mkdir()
    async with (
        serve(root, max_conversion_bytes=1 << 20) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        yield root, client


async def infer(client: Any, model_name: str, a: list[Any], b: list[Any], **more: Any) -> Any:
    module = triton if isinstance(client, triton.InferenceServerClient) else triton_http
    inputs = []
    for name, rows in (("a", a), ("b", b)):
        array = np.array(rows, np.float32)
        tensor = module.InferInput(name, array.shape, "FP32")
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    answer: Any = await client.infer(model_name, inputs, **more)
    return answer.as_numpy("y").tolist()


def converted(server: RunningServer) -> int:
    return server.application.compilation.conversions.converted


async def refusal(client: Any, name: str) -> str:
    """Return the error of a load."""
    with pytest.raises(InferenceServerException) as caught:
        await client.load_model(name)
    return str(caught.value.message())


async def test_it_is_served_with_its_configuration(serve: Serve, repository: Path) -> None:
    async with (
        serve(repository, http_endpoint="port:0", model_control_mode="none") as server,
        triton.InferenceServerClient(server.url) as grpc_client,
        triton_http.InferenceServerClient(server.http) as http_client,
    ):
        answers = [
            await infer(client, "adds", [[1, 2, 3]], [[1, 1, 1]])
            for client in (grpc_client, http_client)
        ]
        metadata = await http_client.get_model_metadata("adds")
        shown: Any = await grpc_client.get_model_config("adds", as_json=True)
        with pytest.raises(InferenceServerException, match="4"):
            await infer(grpc_client, "adds", [[1, 2, 3]] * 5, [[1, 1, 1]] * 5)

    assert [[[2, 3, 4]]] * 2 == answers
    assert [[-1, 3]] * 2 == [tensor["shape"] for tensor in metadata["inputs"]]
    config = shown["config"]
    assert (4, "onnxruntime_onnx") == (config["max_batch_size"], config["platform"])
    assert [4] == config["dynamic_batching"]["preferred_batch_size"]


@pytest.mark.parametrize(
    ("shape", "batch", "shown"), [(("n", 3), 32, [-1, 3]), ((1, 3), 0, [1, 3])]
)
async def test_without_a_configuration_the_model_says_it_all(
    empty: tuple[Path, Any], shape: tuple[int | str, ...], batch: int, shown: list[int]
) -> None:
    root, client = empty
    put(root, "bare", adding(shape))
    await client.load_model("bare")
    config = await client.get_model_config("bare")
    metadata = await client.get_model_metadata("bare")

    assert batch == config.config.max_batch_size
    assert shown == list(metadata.inputs[0].shape)
    assert [[2, 2, 2]] == await infer(client, "bare", [[1, 1, 1]], [[1, 1, 1]])


async def test_the_second_start_converts_nothing(
    serve_kept: Callable[..., Any], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the files or the configuration change."""
    counts = []
    for change in (
        lambda: None,
        lambda: None,
        lambda: put(repository, "adds", adding(operator="Mul")),
        lambda: (repository / "adds/config.pbtxt").write_text(ADDING + "# the same\n"),
    ):
        change()
        async with (
            serve_kept(repository) as server,
            triton.InferenceServerClient(server.url) as client,
        ):
            answer = await infer(client, "adds", [[1, 2, 3]], [[3, 3, 3]])
            counts.append((converted(server), answer[0]))

    assert [(1, [4, 5, 6]), (0, [4, 5, 6]), (1, [3, 6, 9]), (0, [3, 6, 9])] == counts


async def test_a_kept_model_needs_no_reader(
    serve_kept: Callable[..., Any], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_kept(repository):
        pass

    def missing(*_: object) -> None:
        raise AssertionError("it was read again")

    monkeypatch.setattr(importing, "_reader", missing)
    async with serve_kept(repository) as server:
        assert server.application.registry.ready("adds")


async def test_a_damaged_one_is_converted_anew(
    serve_kept: Callable[..., Any], repository: Path, cache: Path
) -> None:
    async with serve_kept(repository):
        pass
    (entry,) = (cache / kept.DIRECTORY).iterdir()
    (entry / "model.stablehlo").write_bytes(b"nothing")
    counts = []
    for _ in range(2):
        async with serve_kept(repository) as server:
            counts.append((converted(server), server.application.registry.ready("adds")))

    assert [(1, True), (0, True)] == counts


@pytest.mark.slow
async def test_what_a_killed_conversion_left_is_removed(
    serve_kept: Callable[..., Any], repository: Path, cache: Path
) -> None:
    async with serve_kept(repository):
        pass
    (entry,) = (cache / kept.DIRECTORY).iterdir()
    left = TemporaryDirectory(entry.parent)
    (left.path / "model").mkdir()
    (left.path / "model/params.safetensors").write_bytes(b"half")
    os.close(left._descriptor or 0)  # as at process exit
    put(repository, "adds", adding(operator="Mul"))
    async with serve_kept(repository) as server:
        assert server.application.registry.ready("adds")

    assert not left.path.exists()
    assert 2 == len(list(entry.parent.iterdir()))


async def test_a_full_disk_of_the_cache_does_not_keep_a_model_from_serving(
    serve_kept: Callable[..., Any], repository: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = importing.import_model

    def import_model(path: Path, directory: Path, *more: Any) -> Any:
        if cache in directory.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, directory, *more)

    monkeypatch.setattr(importing, "import_model", import_model)
    async with serve_kept(repository) as server:
        assert (1, True) == (converted(server), server.application.registry.ready("adds"))

    assert not list((cache / kept.DIRECTORY).iterdir())


async def test_a_full_disk_everywhere_is_a_lack_of_space(
    serve: Serve, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(importing, "import_model", full)
    async with serve(repository, http_endpoint="port:0") as server:
        async with triton_http.InferenceServerClient(server.http) as client:
            with pytest.raises(InferenceServerException, match="No space left") as caught:
                await client.load_model("adds")

    assert "507" == caught.value.status()


@pytest.mark.slow
async def test_no_more_is_kept_than_the_limit_allows(
    serve_kept: Callable[..., Any], repository: Path, cache: Path
) -> None:
    """The least recently used entries are evicted, and a model larger than the limit is not
    kept.

    Entries beyond the limit from an earlier process are removed as well.
    """
    for name in ("second", "third"):
        operator = "Sub" if name == "second" else "Mul"
        put(repository, name, adding(operator=operator), "max_batch_size: 1")
    async with serve_kept(repository):
        pass
    sizes = [kept._size(entry) for entry in (cache / kept.DIRECTORY).iterdir()]
    shutil.rmtree(cache)
    async with serve_kept(repository, conversion_cache_max_bytes=sum(sizes) - 1) as server:
        assert server.application.registry.ready("third")
    left = [len(list((cache / kept.DIRECTORY).iterdir()))]
    for limit in (1, sum(sizes), 0):
        async with serve_kept(repository, conversion_cache_max_bytes=limit) as server:
            assert server.application.registry.ready("third")
            left.append(len(list((cache / kept.DIRECTORY).iterdir())))

    assert [2, 0, 3, 0] == left


async def test_default_model_filename_is_obeyed(empty: tuple[Path, Any]) -> None:
    root, client = empty
    put(root, "m", adding(), 'default_model_filename: "other.onnx"')
    put(root, "m", adding(operator="Mul"), file="1/other.onnx")
    await client.load_model("m")

    assert [[2, 4, 6]] == await infer(client, "m", [[1, 2, 3]], [[2, 2, 2]])


async def test_a_directory_may_have_the_name_of_the_model(empty: tuple[Path, Any]) -> None:
    """onnxruntime's backend uses this for models with external data."""
    root, client = empty
    put(root, "m", adding(), file="1/model.onnx/model.onnx")
    await client.load_model("m")

    assert [[3, 4, 5]] == await infer(client, "m", [[1, 2, 3]], [[2, 2, 2]])


async def test_a_model_file_outside_of_the_version_is_refused(empty: tuple[Path, Any]) -> None:
    root, client = empty
    put(root, "other", adding())
    for name in ("../../other/1/model.onnx", "/etc/passwd", "a/../../x.onnx"):
        put(root, "m", adding(), f'default_model_filename: "{name}"')

        assert "expected a file of the version directory" in await refusal(client, "m")


async def test_dims_of_the_configuration_close_open_ones(empty: tuple[Path, Any]) -> None:
    root, client = empty
    put(root, "m", adding(("n", "length")))

    assert "its dimension 'length' is dynamic" in await refusal(client, "m")

    tensors = "".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: 3 }}\n'
        for kind, name in (("input", "a"), ("input", "b"), ("output", "y"))
    )
    (root / "m/config.pbtxt").write_text(f"max_batch_size: 2\n{tensors}")
    await client.load_model("m")
    metadata = await client.get_model_metadata("m")

    assert [-1, 3] == list(metadata.inputs[0].shape)
    (root / "m/config.pbtxt").write_text(tensors.replace("dims: 3", "dims: [2, 3]"))
    await client.load_model("m")
    assert [2, 3] == list((await client.get_model_metadata("m")).inputs[0].shape)


async def test_a_failed_conversion_names_the_model_and_the_operator(
    empty: tuple[Path, Any],
) -> None:
    root, client = empty
    made = model([node("Bernoulli", ["a"], ["y"])], {"a": (FLOAT, ("n", 3))}, ["y"])
    put(root, "random", made, 'backend: "onnxruntime"')
    text = await refusal(client, "random")

    assert "failed to load 'random', model.onnx cannot be converted" in text
    assert "Bernoulli" in text
    assert "the_y" in text


async def test_files_that_are_no_models_are_refused(
    empty: tuple[Path, Any], tmp_path: Path
) -> None:
    root, client = empty
    file = put(root, "m", adding()) / "1/model.onnx"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])

    assert "model.onnx cannot be converted: not an ONNX model: " in await refusal(client, "m")

    with file.open("wb") as huge:
        huge.truncate(2 << 20)
    assert "more than the 1048576 allowed" in await refusal(client, "m")

    file.unlink()
    os.mkfifo(file)
    assert "is not a regular file" in await refusal(client, "m")

    file.unlink()
    outside = save(adding(), tmp_path)
    file.symlink_to(outside)
    assert (
        "is outside the model repository and every model_root (--model-root), or a link that"
        " leads outside" in await refusal(client, "m")
    )

    file.unlink()
    (root / "m/config.pbtxt").write_text('backend: "onnxruntime"')
    assert "model.onnx is missing" in await refusal(client, "m")


@pytest.mark.parametrize(
    ("kind", "file", "advice"),
    [
        ("tensorflow_graphdef", "model.graphdef", "tf2onnx"),
        ("tensorflow_savedmodel", "model.savedmodel", "tf2onnx"),
        ("tensorrt_plan", "model.plan", "serve the ONNX model the plan was built from"),
        ("pytorch_libtorch", "model.pt", "torch.onnx.export"),
        ("openvino", "model.xml", "ONNX"),
    ],
)
async def test_models_of_other_runtimes_are_refused_by_name(
    empty: tuple[Path, Any], kind: str, file: str, advice: str
) -> None:
    root, client = empty
    (root / "m/1").mkdir(parents=True)
    (root / "m/1" / file).write_bytes(b"")
    without_configuration = await refusal(client, "m")
    (root / "m/config.pbtxt").write_text(f'platform: "{kind}"')
    with_configuration = await refusal(client, "m")

    for text in (without_configuration, with_configuration):
        assert kind in text
        assert advice in text


async def test_a_client_may_send_one(empty: tuple[Path, Any]) -> None:
    """A separate process, which may crash, converts it first."""
    root, client = empty
    data = save(adding(("n", "length")), root.parent).read_bytes()
    config = (
        '{"max_batch_size": 2, "platform": "onnxruntime_onnx", "input": ['
        '{"name": "a", "data_type": "TYPE_FP32", "dims": [3]},'
        '{"name": "b", "data_type": "TYPE_FP32", "dims": [3]}]}'
    )
    await client.load_model("sent", config=config, files={"file:1/model.onnx": data})
    answer = await infer(client, "sent", [[1, 2, 3]], [[2, 2, 2]])
    with pytest.raises(
        InferenceServerException, match=r"model\.onnx cannot be converted: not an ONNX model: "
    ):
        await client.load_model("sent", config=config, files={"file:1/model.onnx": data[:50]})

    assert [[3, 4, 5]] == answer
