"""Everything that caches information about another model notices its reloads.

Each dependent model is asked before and after each change of the inner model, in mixed order. It
must use the current model or return a named error, and work again once the inner model is restored
or it is itself reloaded.
"""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.asking import Client
from support.asking import client as asking
from support.python_models import write
from support.server import Serve
from tritonclient.utils import InferenceServerException

import xlaserve

FP32, INT32 = ("FP32", [-1, 2]), ("INT32", [-1, 2])
CHANGES: dict[str, tuple[tuple[str, list[int]], Callable[[Any], Any]]] = {
    "twice": (FP32, lambda x: 2 * x),
    "thrice": (FP32, lambda x: 3 * x),
    "integers": (INT32, lambda x: (4 * x).astype(np.int32)),
    "wide": (("FP32", [-1, 3]), lambda x: 5 * x),
}
"""Variants of the inner model: its output, and its function.

`wide` also takes another number of columns.
"""

X = np.array([[1, 2]], np.float32)
CALLS = """
class Model(PythonModel):
    def load(self, context):
        self.context = context
    def infer(self, inputs):
        found = self.context.infer_and_wait("inner", {"x": inputs["x"]})
        return {"y": found["t"].astype(np.float32)}
"""
CACHED = "response_cache { enable: true }\n"


def export(root: Path, name: str, function: Any, takes: Any) -> None:
    xlaserve.export_model(function, {}, {"x": takes}, root / name / "1", max_batch_size=4)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The variants of the inner model, and a last ensemble step for each of its datatypes."""
    root = tmp_path_factory.mktemp("shelf")
    for name, ((datatype, dims), computes) in CHANGES.items():
        made = {"FP32": np.float32, "INT32": np.int32}[datatype]
        export(
            root,
            name,
            lambda _, x, computes=computes, made=made: {"t": computes(x).astype(made)},
            ("FP32", dims),
        )
    export(root, "adds", lambda _, x: {"y": x + 1}, FP32)
    export(root, "adds_integers", lambda _, x: {"y": x.astype(np.float32) + 1}, INT32)
    return root


def chain(root: Path, name: str, steps: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(f"""
platform: "ensemble"
max_batch_size: 4
input [{{ name: "x", data_type: TYPE_FP32, dims: [ 2 ] }}]
output [{{ name: "y", data_type: TYPE_FP32, dims: [ 2 ] }}]
ensemble_scheduling {{ {steps} }}
""")


def step(model: str, takes: str, gives: str, made: str, version: int = -1) -> str:
    return (
        f'step [{{ model_name: "{model}" model_version: {version} '
        f'input_map {{ key: "x" value: "{takes}" }} '
        f'output_map {{ key: "{gives}" value: "{made}" }} }}]'
    )


JOINED = step("inner", "x", "t", "t") + step("adds", "t", "y", "y")
PYTHON = """
max_batch_size: 4
input [{ name: "x", data_type: TYPE_FP32, dims: [ 2 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ 2 ] }]
"""
REMEMBERERS = {
    "joined": 1,
    "pinned": 1,
    "around": 1,
    "calls": 0,
    "calls_cached": 0,
    "calls_around": 1,
}
"""Models that depend on the inner one, and the number each adds to its output."""


@pytest.fixture
def root(tmp_path: Path, shelf: Path) -> Path:
    root = tmp_path / "models"
    shutil.copytree(shelf / "adds", root / "adds")
    put(root, shelf, "twice")
    chain(root, "joined", JOINED)
    chain(root, "pinned", step("inner", "x", "t", "t", 1) + step("adds", "t", "y", "y"))
    chain(root, "around", step("joined", "x", "y", "y"))
    write(root, "calls", CALLS, PYTHON)
    write(root, "calls_cached", CALLS, PYTHON + CACHED)
    around = CALLS.replace('"inner"', '"around"').replace('["t"]', '["y"]')
    write(root, "calls_around", around, PYTHON + CACHED)
    return root


def put(root: Path, shelf: Path, form: str, version: int = 1) -> None:
    """Put a variant of the inner model into the repository."""
    shutil.rmtree(root / "inner" / str(version), ignore_errors=True)
    (root / "inner").mkdir(exist_ok=True, parents=True)
    shutil.copytree(shelf / form / "1", root / "inner" / str(version))


@pytest.fixture
async def client(serve: Serve, root: Path) -> AsyncIterator[Client]:
    more = {"load_model": ("*",), "allow_python_models": True}
    async with serve(root, **more) as server, asking(server) as client:
        yield client


async def answer(client: Client, name: str) -> list[float] | str:
    """Return the numbers in a dependent model's answer, or its error status."""
    try:
        return [float(one) for one in (await client.infer(name, x=X))["y"].ravel()]
    except InferenceServerException as error:
        return str(error.status()).removeprefix("StatusCode.")


def wanted(name: str, form: str) -> list[float] | str:
    """Return the expected answer of a dependent model for a variant of the inner one."""
    if form == "wide":  # callers that pass two columns on get an error about three
        return "INVALID_ARGUMENT" if REMEMBERERS[name] == 0 else "UNAVAILABLE"
    if form == "integers" and REMEMBERERS[name]:
        return "UNAVAILABLE"
    computes = CHANGES[form][1]
    return [float(one) + REMEMBERERS[name] for one in computes(X).ravel()]


@pytest.mark.parametrize("seed", range(5))
async def test_the_numbers_are_those_of_what_is_loaded_now(
    client: Client, root: Path, shelf: Path, seed: int
) -> None:
    chosen = random.Random(seed)
    found, expected = [], []
    form = "twice"
    for _ in range(6):
        form = chosen.choice([one for one in CHANGES if one != form])
        put(root, shelf, form)
        await client.grpc.load_model("inner")
        for name in chosen.sample(sorted(REMEMBERERS), len(REMEMBERERS)):
            for _ in range(chosen.choice((1, 2))):
                found.append((form, name, await answer(client, name)))
                expected.append((form, name, wanted(name, form)))

    assert expected == found


async def test_a_newer_version_is_noticed_though_the_older_one_stays(
    client: Client, root: Path, shelf: Path
) -> None:
    (root / "inner" / "config.pbtxt").write_text("version_policy { all {} }")
    await client.grpc.load_model("inner")
    before = {name: await answer(client, name) for name in REMEMBERERS}
    put(root, shelf, "thrice", 2)
    await client.grpc.load_model("inner")
    after = {name: await answer(client, name) for name in REMEMBERERS}

    assert {name: wanted(name, "twice") for name in REMEMBERERS} == before
    newest = {name: wanted(name, "thrice") for name in REMEMBERERS}
    assert newest | {"pinned": wanted("pinned", "twice")} == after


async def test_an_ensemble_that_no_longer_fits_says_why_and_is_not_ready(
    client: Client, root: Path, shelf: Path
) -> None:
    put(root, shelf, "integers")
    await client.grpc.load_model("inner")
    ready = await client.grpc.is_model_ready("joined")
    said = await client.fails("joined", x=X)
    refused = await client.refused("joined")
    index: Any = await client.grpc.get_model_repository_index(as_json=True)
    (shown,) = [one for one in index["models"] if one["name"] == "joined"]

    why = "ensemble: 'adds' expects FP32[-1,2] for 'x', tensor 't' is INT32[-1,2]"
    assert not ready
    assert (
        "UNAVAILABLE: model 'joined' is not ready, its state is UNAVAILABLE: a step was reloaded"
        f" with different tensors: {why}"
    ) == said
    assert f"failed to load 'joined', {why}" == refused
    assert f"a step was reloaded with different tensors: {why}" == shown["reason"]


async def test_steps_that_change_together_answer_by_the_new_datatype(
    client: Client, root: Path, shelf: Path
) -> None:
    put(root, shelf, "integers")
    shutil.rmtree(root / "adds")
    shutil.copytree(shelf / "adds_integers", root / "adds")
    await client.grpc.load_model("inner")
    await client.grpc.load_model("adds")
    found = [await answer(client, name) for name in ("joined", "around")]

    assert [[5.0, 9.0]] * 2 == found


async def test_a_load_plans_an_ensemble_anew_though_its_files_are_the_same(
    client: Client, root: Path
) -> None:
    """Its step has become decoupled, so the ensemble is decoupled once reloaded."""
    shutil.rmtree(root / "inner" / "1")
    code = """
class Model(PythonModel):
    def infer(self, inputs):
        yield {"t": inputs["x"]}
"""
    config = PYTHON.replace('"y"', '"t"') + "model_transaction_policy { decoupled: true }"
    write(root, "inner", code, config)
    await client.grpc.load_model("inner")
    before = await client.fails("joined", x=X)
    await client.grpc.load_model("joined")
    after = await client.fails("joined", x=X)

    assert (
        "its steps changed their number of answers, sequence support or optional tensors since it"
        " was loaded: load it again" in before
    )
    assert after.startswith("UNIMPLEMENTED: model 'joined'")


LENIENT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            made = {made}
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("t", t) for t in made]))
        return answers
"""


@pytest.mark.parametrize("name", ["joined", "around", "bare", "around_bare"])
@pytest.mark.parametrize(
    ("made", "got"),
    [
        ("[7 * x]", ""),
        ("[x.astype(np.float64)]", "FP64[1,2]"),
        ("[x[:, :1]]", "FP32[1,1]"),
        ("[]", "none"),
    ],
    ids=["same", "datatype", "shape", "absent"],
)
async def test_a_step_may_become_a_model_whose_outputs_have_any_form(
    serve: Serve, root: Path, name: str, made: str, got: str
) -> None:
    """Ensembles keep working; an answer that contradicts their declared outputs is refused."""
    chain(root, "bare", step("inner", "x", "t", "y"))
    chain(root, "around_bare", step("bare", "x", "y", "y"))
    more = {"load_model": ("*",), "allow_python_models": True}
    async with serve(root, **more) as server, asking(server) as client:
        shutil.rmtree(root / "inner" / "1")
        write(
            root, "inner", LENIENT.replace("{made}", made), PYTHON.replace('"y"', '"t"'), begin=""
        )
        await client.grpc.load_model("inner")
        ready = await client.grpc.is_model_ready(name)
        try:
            found: Any = (await client.infer(name, x=X))["y"].tolist()
        except InferenceServerException as error:
            found = f"{error.status()}: {error.message()}".removeprefix("StatusCode.")

    assert ready
    if not got:
        adds = 0 if name.endswith("bare") else 1
        assert [[7.0 + adds, 14.0 + adds]] == found
    elif name.endswith("bare"):
        assert "INTERNAL: model 'bare': output 'y': expected FP32[-1,2] as before" in found
        assert f"got {got}; reload the ensemble" in found
    else:
        assert found.startswith("INVALID_ARGUMENT: model 'adds'")


async def test_two_versions_of_a_model_are_steps_of_their_own(
    serve: Serve, root: Path, shelf: Path
) -> None:
    """Each is planned with its own tensors, in either order."""
    (root / "inner" / "config.pbtxt").write_text("version_policy { all {} }")
    put(root, shelf, "integers", 2)
    for name, first, second in (("up", 1, 2), ("down", 2, 1)):
        (root / name / "1").mkdir(parents=True)
        kinds = {1: "TYPE_FP32", 2: "TYPE_INT32"}
        (root / name / "config.pbtxt").write_text(f"""
platform: "ensemble"
max_batch_size: 4
input [{{ name: "x", data_type: TYPE_FP32, dims: [ 2 ] }}]
output [
  {{ name: "a", data_type: {kinds[first]}, dims: [ 2 ] }},
  {{ name: "b", data_type: {kinds[second]}, dims: [ 2 ] }}
]
ensemble_scheduling {{
  {step("inner", "x", "t", "a", first)}
  {step("inner", "x", "t", "b", second)}
}}
""")
    more = {"load_model": ("up", "down")}
    async with serve(root, **more) as server, asking(server) as client:
        found = {name: await client.infer(name, x=X) for name in ("up", "down")}

    assert [[2.0, 4.0], [4, 8]] == [found["up"][one].ravel().tolist() for one in "ab"]
    assert [[4, 8], [2.0, 4.0]] == [found["down"][one].ravel().tolist() for one in "ab"]
    assert ["float32", "int32"] == [str(found["up"][one].dtype) for one in "ab"]


async def test_a_tensor_of_an_open_size_is_checked_before_a_step_of_a_fixed_one(
    serve: Serve, root: Path
) -> None:
    tensor = "data_type: TYPE_FP32, dims: [ -1 ]"
    wide = f'input [{{ name: "x", {tensor} }}]\noutput [{{ name: "t", {tensor} }}]\n'
    (root / "open" / "1").mkdir(parents=True)
    (root / "open" / "config.pbtxt").write_text(f'backend: "identity"\nmax_batch_size: 4\n{wide}')
    (root / "whole" / "1").mkdir(parents=True)
    steps = step("open", "x", "t", "t") + step("adds", "t", "y", "y")
    (root / "whole" / "config.pbtxt").write_text(
        f'platform: "ensemble"\nmax_batch_size: 4\n{wide.replace(chr(34) + "t", chr(34) + "y")}'
        f"ensemble_scheduling {{ {steps} }}"
    )
    async with serve(root, load_model=("whole",)) as server, asking(server) as client:
        fits = (await client.infer("whole", x=X))["y"].tolist()
        wider = await client.fails("whole", x=np.ones((1, 3), np.float32))

    assert [[2.0, 3.0]] == fits
    assert "INVALID_ARGUMENT: model 'adds', input 'x': expected FP32[-1,2], got FP32[1,3]" == wider


TWO_AT_ONCE = (
    PYTHON.replace("max_batch_size: 4", "max_batch_size: 2")
    + CACHED
    + "dynamic_batching { max_queue_delay_microseconds: 2000000 }\n"
)
ASKS_ONCE = """
import triton_python_backend_utils as pb_utils
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "x").as_numpy()
        asked = pb_utils.InferenceRequest(
            model_name="inner",
            requested_output_names=["t"],
            inputs=[pb_utils.Tensor("x", x)],
        )
        return self.answers(requests, x, asked.exec())

    def answers(self, requests, x, found):
        times = -1.0
        if not found.has_error():
            times = found.output_tensors()[0].as_numpy()[0, 0] / x[0, 0]
        given = []
        for request in requests:
            own = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            y = pb_utils.Tensor("y", (own * times).astype(np.float32))
            given.append(pb_utils.InferenceResponse(output_tensors=[y]))
        return given
"""
"""Calls the inner model once for all requests of an execution; returns -x if it is missing."""
IN_TURN = ASKS_ONCE.replace("def execute", "async def execute").replace(
    "asked.exec()", "await asked.async_exec()"
)
ASKING_ONCE = {"triton": (ASKS_ONCE, ""), "async": (IN_TURN, ""), "own": (CALLS, None)}


def asking_once(root: Path, kind: str) -> str:
    code, begin = ASKING_ONCE[kind]
    more: Any = {} if begin is None else {"begin": begin}
    write(root, "once", code, TWO_AT_ONCE, **more)
    return "once"


@pytest.mark.parametrize("kind", ASKING_ONCE)
async def test_all_requests_of_an_execution_are_made_with_what_it_asked(
    client: Client, root: Path, shelf: Path, kind: str
) -> None:
    name = asking_once(root, kind)
    await client.grpc.load_model(name)

    async def both() -> list[Any]:
        found = await asyncio.gather(*(client.infer(name, x=X * number) for number in (1, 3)))
        return [one["y"].ravel().tolist() for one in found]

    before = await both()
    put(root, shelf, "thrice")
    await client.grpc.load_model("inner")
    after = await both()

    assert [[2.0, 4.0], [6.0, 12.0]] == before
    assert [[3.0, 6.0], [9.0, 18.0]] == after


async def test_an_answer_without_a_model_is_kept_until_there_is_one(
    client: Client, root: Path
) -> None:
    config = PYTHON + CACHED
    write(root, "falls_back", ASKS_ONCE, config, begin="")
    await client.grpc.load_model("falls_back")
    await client.grpc.unload_model("inner")
    without = [await answer(client, "falls_back") for _ in range(2)]
    await client.grpc.load_model("inner")
    with_it = await answer(client, "falls_back")

    assert [[-1.0, -2.0]] * 2 == without
    assert [2.0, 4.0] == with_it


GOES_BY_READINESS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        times = 1 if pb_utils.is_model_ready("inner") else -1
        given = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            given.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x * times)]))
        return given
"""


async def test_an_answer_that_goes_by_the_readiness_of_a_model_is_kept_as_long_as_that(
    client: Client, root: Path
) -> None:
    write(root, "looks", GOES_BY_READINESS, PYTHON + CACHED, begin="")
    await client.grpc.load_model("looks")
    found = []
    for change in (client.grpc.unload_model, client.grpc.load_model) * 2:
        found += [await answer(client, "looks") for _ in range(2)]
        await change("inner")

    assert [[1.0, 2.0]] * 2 + [[-1.0, -2.0]] * 2 == found[:4]
    assert found[:4] == found[4:]
