"""model_warmup samples: which are executed, and which make a load fail."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xlaserve.errors import InvalidModel, LoadCancelled
from xlaserve.files.roots import Roots
from xlaserve.model_config.text import parse_json
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import Answer, ModelInfo
from xlaserve.runtime.wrappers import warmup
from xlaserve.tensors import BYTES, DATATYPES, TensorSpec

FP32 = DATATYPES["FP32"]
ZERO = {"data_type": "TYPE_FP32", "dims": [2], "zero_data": True}


class Model:
    """Records its inputs."""

    on_demand: Any = None
    dispatching = None
    replicas = 1

    def __init__(self, *, batched: bool = True, text: bool = False) -> None:
        inputs = [TensorSpec("x", FP32, (-1, -1) if batched else (2,))]
        if text:
            inputs.append(TensorSpec("t", BYTES, (-1, 2)))
        self.info = ModelInfo("fake", tuple(inputs), (), max_batch_size=4 if batched else 0)
        self.given: list[tuple[int, Mapping[str, Any]]] = []
        self.closed = False
        self.error: Exception | None = None

    def execute(self, inputs: Any, *, resident: bool = False, replica: int = 0) -> Any:
        self.given.append((replica, inputs))
        if self.error is not None:
            raise self.error
        return {}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version directory, next to the samples' directory."""
    (tmp_path / "repository/m/1").mkdir(parents=True)
    (tmp_path / "repository/m/warmup").mkdir()
    return tmp_path / "repository/m/1"


def run(model: Any, version: Path, *samples: Any, **more: Any) -> None:
    config = parse_json(json.dumps({"model_warmup": list(samples)}))
    roots = Roots.of([version.parents[1]])
    context = LoadContext("m", "1", config, roots=roots, **more)
    warmup.run(model, version, context)


def sample(x: Any = ZERO, **more: Any) -> dict[str, Any]:
    return {"name": "s", "batch_size": 1, "inputs": {"x": x}} | more


def refused(version: Path, problem: str, *samples: Any, model: Any = None) -> None:
    with pytest.raises(InvalidModel, match=problem):
        run(model or Model(), version, *samples)


# --- what is executed ---


def test_every_sample_is_executed_on_every_replica_as_often_as_it_says(version: Path) -> None:
    model = Model()
    model.replicas = 2
    run(model, version, sample(count=2), sample(batch_size=3))

    assert [0, 0, 1, 1, 0, 1] == [replica for replica, _ in model.given]
    assert [(1, 2)] * 4 + [(3, 2)] * 2 == [inputs["x"].shape for _, inputs in model.given]
    assert all(inputs["x"].dtype == np.float32 for _, inputs in model.given)
    assert not any(inputs["x"].any() for _, inputs in model.given)


def test_random_data_is_within_the_datatype_and_the_same_each_time(version: Path) -> None:
    found = []
    for _ in range(2):
        model = Model(text=True)
        text = {"data_type": "TYPE_STRING", "dims": [2], "random_data": True}
        x = {"data_type": "TYPE_FP32", "dims": [500], "random_data": True}
        run(model, version, {"inputs": {"x": x, "t": text}})
        found.append(model.given[0][1])

    assert 0 <= found[0]["x"].min() < found[0]["x"].max() <= 1
    assert found[0]["x"].tobytes() == found[1]["x"].tobytes()
    assert all(isinstance(element, bytes) for element in found[0]["t"].ravel())
    assert found[0]["t"].tolist() == found[1]["t"].tolist()


def test_a_file_is_repeated_for_each_row_of_the_batch(version: Path) -> None:
    data = np.array([1.5, -2], np.float32)
    (version.parent / "warmup/raw").write_bytes(data.tobytes())
    (version.parent / "warmup/text").write_bytes(b"\x02\0\0\0ab\x00\0\0\0")
    x = {"data_type": "TYPE_FP32", "dims": [2], "input_data_file": "raw"}
    text = {"data_type": "TYPE_STRING", "dims": [2], "input_data_file": "text"}
    model = Model(text=True)
    run(model, version, {"batch_size": 2, "inputs": {"x": x, "t": text}})

    ((_, given),) = model.given
    assert [data.tolist()] * 2 == given["x"].tolist()
    assert [[b"ab", b""]] * 2 == given["t"].tolist()


def test_a_model_without_batches_has_the_dims_as_they_are(version: Path) -> None:
    model = Model(batched=False)
    run(model, version, sample(batch_size=0))

    assert (2,) == model.given[0][1]["x"].shape


def test_a_shape_on_demand_is_compiled(version: Path) -> None:
    compiled, asked = Model(), []

    class OnDemand:
        def shape_of(self, inputs: Any) -> Any:
            return inputs["x"].shape

        def find(self, shape: Any) -> Any:
            return None

        def compile(self, shape: Any) -> Any:
            asked.append(shape)
            return compiled

    model = Model()
    model.on_demand = OnDemand()
    run(model, version, sample())

    assert [(1, 2)] == asked
    assert ([], 1) == (model.given, len(compiled.given))


def test_a_model_of_many_answers_gives_its_first(version: Path) -> None:
    class Stepped(Model):
        closed_answers = 0

        def generate(self, inputs: Any, parameters: Any, *, replica: int = 0) -> Any:
            self.given.append((replica, inputs))
            try:
                while True:
                    yield Answer({})
            finally:
                self.closed_answers += 1

    model = Stepped()
    run(model, version, sample())

    assert (1, 1) == (len(model.given), model.closed_answers)


class Code(Model):
    """A model that gets requests, and answers them in a thread."""

    concurrency = 1
    is_decoupled = is_batched = False

    def handle(self, replica: int, requests: Sequence[Any], freed: Callable[[], None]) -> None:
        def answer() -> None:
            for request in requests:
                self.given.append((replica, request.inputs))
                if self.error is not None:
                    request.fail(self.error)
                else:
                    request.answer({})
            freed()

        threading.Thread(target=answer).start()


def test_code_is_handed_the_samples(version: Path) -> None:
    model = Code()
    run(model, version, sample(count=3))
    assert 3 == len(model.given)
    model.error = ValueError("no")
    refused(version, r"model_warmup\[0\] \('s'\) failed: ValueError: no", sample(), model=model)


# --- what makes a load fail ---


def test_an_execution_that_fails_names_the_sample(version: Path) -> None:
    class Second(Model):
        def execute(self, *args: Any, **more: Any) -> Any:
            if self.given:
                self.error = ArithmeticError("by zero")
            return super().execute(*args, **more)

    problem = r"model_warmup\[1\] \('second'\) failed: ArithmeticError: by zero"
    refused(version, problem, sample(), sample(name="second"), model=Second())


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (sample(ZERO | {"dims": [2, 2]}), r"input 'x': expected FP32\[-1,-1\], got FP32\[1,2,2\]"),
        (sample(ZERO | {"data_type": "TYPE_INT32"}), r"expected FP32\[-1,-1\], got INT32\[1,2\]"),
        (sample(inputs={"z": ZERO}), "expected the inputs x, got z"),
        (sample(batch_size=5), "expected a batch_size of 1 to 4, got 5"),
        (sample(ZERO | {"dims": [1 << 40]}), "expected at most 67108864 bytes, got 4398046511104"),
    ],
)
def test_a_sample_that_the_model_does_not_take_is_refused(
    version: Path, given: Any, problem: str
) -> None:
    refused(version, problem, given)


def of_file(name: str = "raw") -> dict[str, Any]:
    return sample({"data_type": "TYPE_FP32", "dims": [2], "input_data_file": name})


def test_a_missing_file_fails_the_load(version: Path) -> None:
    refused(version, "warmup/raw is missing", of_file())


@pytest.mark.parametrize("size", [0, 7, 9])
def test_a_file_of_another_size_fails_the_load(version: Path, size: int) -> None:
    (version.parent / "warmup/raw").write_bytes(bytes(size))
    refused(version, "warmup/raw", of_file())


def test_a_huge_file_is_not_read(version: Path) -> None:
    with (version.parent / "warmup/raw").open("wb") as file:
        file.truncate(1 << 40)
    refused(version, "warmup/raw has 1099511627776 bytes, more than the 8 allowed", of_file())


def test_a_link_out_of_the_repository_is_refused(version: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(8))
    (version.parent / "warmup/raw").symlink_to(tmp_path / "secret")
    refused(
        version,
        r"is outside the model repository and every model_root \(--model-root\), or a link that"
        " leads outside",
        of_file(),
    )


def test_a_directory_is_no_sample(version: Path) -> None:
    (version.parent / "warmup/raw").mkdir()
    refused(version, "raw is not a regular file", of_file())


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (of_file("../1/model.json"), r"input_data_file: expected the name of a file"),
        (of_file("/etc/passwd"), r"input_data_file: expected the name of a file"),
        (of_file(".."), r"input_data_file: expected the name of a file"),
        (sample({"data_type": "TYPE_FP32", "dims": [2]}), r"inputs\[.x.\]: expected zero_data"),
        (sample(ZERO | {"dims": [-1]}), r"dims\[0\]: expected a size above 0, got -1"),
        (sample({"dims": [2], "zero_data": True}), r"data_type: expected one of"),
        (sample(inputs={}), r"inputs: expected the inputs of the model, got none"),
        (sample(count=10**6), r"count: expected at most 10000, got 1000000"),
    ],
)
def test_a_sample_that_cannot_be_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(InvalidModel, match=problem):
        parse_json(json.dumps({"model_warmup": [given]}))
    with pytest.raises(InvalidModel, match=r"batch_size: expected 1 to 2"):
        parse_json(json.dumps({"max_batch_size": 2, "model_warmup": [sample(batch_size=3)]}))


def test_a_load_that_is_cancelled_warms_no_more(version: Path) -> None:
    model = Model()

    def check() -> None:
        if len(model.given) == 2:
            raise LoadCancelled("m")

    with pytest.raises(LoadCancelled):
        run(model, version, sample(count=100), check_cancelled=check)

    assert 2 == len(model.given)
