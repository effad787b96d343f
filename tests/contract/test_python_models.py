"""Python models with our own interface, in a whole server."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
import tritonclient.http as triton_http
from support import python_models
from support.asking import given
from support.python_models import Start, starting, write, write_function
from support.server import Serve

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples" / "python_models"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def start(serve: Serve, root: Path) -> Start:
    return starting(serve, root)


ones = np.ones(2, np.float32)


async def test_code_is_run_only_where_the_operator_allows_it(start: Any, root: Path) -> None:
    marker = root / "ran"
    write_function(root, "m", "return {'y': x}")
    (root / "m" / "1" / "model.py").write_text(f"open({str(marker)!r}, 'w')\n")
    async with start(load="none_such", allow_python_models=False) as client:
        text = await client.refused("m")

    assert "failed to load 'm', it is code (model.py)" in text
    assert "--allow-python-models" in text
    assert not marker.exists()


async def test_code_that_came_with_a_request_is_never_run(start: Any, root: Path) -> None:
    marker = root / "ran"
    write_function(root, "m", "return {'y': x}")
    code = f"open({str(marker)!r}, 'w')\n"
    async with start() as client:
        config = '{"backend": "python"}'
        text = await client.refused("m", config=config, files={"file:1/model.py": code.encode()})

    assert "model.py came with the request, but code from clients is never run" in text
    assert not marker.exists()


async def test_a_model_answers_over_grpc_and_http(start: Any, root: Path) -> None:
    write(
        root,
        "texts",
        """
        class Upper(PythonModel):
            inputs = {"text": ("BYTES", [-1])}
            outputs = {"upper": ("BYTES", [-1]), "length": ("INT32", [-1])}

            def load(self, context):
                self.mark = context.model.encode()

            def infer(self, inputs):
                found = [one.upper() + self.mark for one in inputs["text"].tolist()]
                lengths = np.array([len(one) for one in found], np.int32)
                return {"upper": np.array(found, object), "length": lengths}
        """,
    )
    texts = np.array([b"a", b"\xff\x00"], object)
    async with start(http_endpoint="port:0") as client:
        metadata = await client.grpc.get_model_metadata("texts")
        outputs = await client.infer("texts", text=texts)
        http: Any = triton_http.InferenceServerClient(client.server.http)
        over_http = await asyncio.to_thread(
            http.infer, "texts", [given(triton_http, "text", texts)]
        )
        chosen = await client.infer("texts", wanted=["length"], text=texts)
        await asyncio.to_thread(http.close)

    assert metadata.platform == "python"
    assert [b"Atexts", b"\xff\x00texts"] == outputs["upper"].tolist()
    assert outputs["upper"].tolist() == over_http.as_numpy("upper").tolist()
    assert {"length": [6, 7]} == {name: array.tolist() for name, array in chosen.items()}


FAULTS = {
    "raises": ("raise KeyError('lost')", "INTERNAL: model 'raises': KeyError: 'lost'"),
    "exits": ("raise SystemExit(3)", "INTERNAL: model 'exits': SystemExit: 3"),
    "deep": (
        "return self.infer(inputs)",
        "INTERNAL: model 'deep': RecursionError: maximum recursion depth exceeded",
    ),
    "refuses": (
        "raise InferenceError('too long')",
        "INVALID_ARGUMENT: model 'refuses': too long",
    ),
    "away": (
        "raise InferenceError('later', 'unavailable')",
        "UNAVAILABLE: model 'away': later",
    ),
    "nothing": (
        "return None",
        "INTERNAL: model 'nothing': its code: expected a mapping of arrays by output, got NoneType",
    ),
    "missing": (
        "return {'z': x}",
        "INTERNAL: model 'missing': expected its code to return output 'y', got 'z'",
    ),
    "dtype": (
        "return {'y': x.astype(np.int64)}",
        "INTERNAL: model 'dtype': output 'y' of its code: expected FP32[-1], got INT64[2]",
    ),
    "complex": (
        "return {'y': x.astype(np.complex64)}",
        "INTERNAL: model 'complex': output 'y' of its code: expected FP32[-1], got complex64[2]",
    ),
    "shape": (
        "return {'y': x.reshape(1, 2)}",
        "INTERNAL: model 'shape': output 'y' of its code: expected FP32[-1], got FP32[1,2]",
    ),
}


async def test_what_code_does_wrong_is_an_error_that_names_model_and_tensor(
    start: Any, root: Path
) -> None:
    for name, (body, _) in FAULTS.items():
        write_function(root, name, body)
    async with start() as client:
        found = {name: await client.fails(name, x=ones) for name in FAULTS}
        again = await client.fails("exits", x=ones)

    for name, (_, expected) in FAULTS.items():
        assert found[name].removeprefix("StatusCode.").startswith(expected)
    assert again == found["exits"]


async def test_rows_of_different_requests_are_joined_only_where_that_is_declared(
    start: Any, root: Path
) -> None:
    for name, batched in (("joined", True), ("single", False)):
        write(
            root,
            name,
            f"""
            import threading
            class Model(PythonModel):
                inputs = {{"x": ("INT32", [1])}}
                outputs = {{"rows": ("INT32", [1])}}
                max_batch_size = 8
                batched = {batched}

                def infer(self, inputs):
                    x = inputs["x"]
                    return {{"rows": np.full((len(x), 1), len(x), np.int32)}}
            """,
            "dynamic_batching { max_queue_delay_microseconds: 60000000 preferred_batch_size: [4] }"
            if batched
            else "",
        )
    row = np.ones((1, 1), np.int32)
    async with start() as client:
        found = {}
        for name in ("joined", "single"):
            answers = await asyncio.gather(*(client.infer(name, x=row) for _ in range(4)))
            found[name] = [answer["rows"].tolist() for answer in answers]

    assert {"joined": [[[4]]] * 4, "single": [[[1]]] * 4} == found


async def test_models_do_not_share_modules_of_the_same_name(start: Any, root: Path) -> None:
    for number in (1, 2):
        write(
            root,
            f"m{number}",
            """
            import helper
            from package.inner import other

            class Model(PythonModel):
                inputs = outputs = {"x": ("INT32", [1])}

                def infer(self, inputs):
                    import late
                    return {"x": inputs["x"] * helper.NUMBER + other() + late.NUMBER}
            """,
            beside={
                "helper.py": f"NUMBER = {number}",
                "package/__init__.py": "",
                "package/inner.py": "import helper\n\ndef other():\n    return helper.NUMBER * 10",
                "late.py": f"NUMBER = {number}00",
            },
        )
    async with start() as client:
        found = [int((await client.infer(f"m{n}", x=np.ones(1, np.int32)))["x"][0]) for n in (1, 2)]
        await client.grpc.unload_model("m1")
        left = int((await client.infer("m2", x=np.ones(1, np.int32)))["x"][0])

    assert [111, 222] == found
    assert left == 222
    assert not list(root.rglob("__pycache__"))


async def test_each_copy_calls_its_object_in_one_thread(start: Any, root: Path) -> None:
    write(
        root,
        "m",
        """
        import threading
        together = threading.Barrier(2)

        class Model(PythonModel):
            inputs = {"x": ("INT32", [1])}
            outputs = {"replica": ("INT32", [1])}

            def load(self, context):
                self.replica, self.thread = context.replica, threading.get_ident()

            def infer(self, inputs):
                together.wait(60)
                assert self.thread == threading.get_ident()
                return {"replica": np.array([self.replica], np.int32)}
        """,
        "instance_group { count: 2 kind: KIND_CPU }",
    )
    ask = {"x": np.ones(1, np.int32)}
    async with start() as client:
        answers = await asyncio.gather(*(client.infer("m", **ask) for _ in range(2)))

    assert [0, 1] == sorted(int(answer["replica"][0]) for answer in answers)


async def test_copies_that_were_quick_and_are_slow_are_handed_less(start: Any, root: Path) -> None:
    """At that moment they have been given more than they should have."""
    write(
        root,
        "m",
        """
        import time

        class Model(PythonModel):
            inputs = outputs = {"x": ("INT32", [1])}

            def infer(self, inputs):
                time.sleep(0.005 if inputs["x"][0] else 0)
                return {"x": inputs["x"]}
        """,
        "instance_group { count: 2 kind: KIND_CPU }",
    )
    async with start() as client:
        for _ in range(20):
            await client.infer("m", x=np.zeros(1, np.int32))
        asked = [client.infer("m", x=np.array([n], np.int32)) for n in range(1, 101)]
        answers = await asyncio.gather(*asked)

    assert list(range(1, 101)) == [int(answer["x"][0]) for answer in answers]


async def test_a_coroutine_works_on_many_requests_away_from_the_servers_loop(
    start: Any, root: Path
) -> None:
    write(
        root,
        "m",
        """
        import asyncio, threading

        class Model(PythonModel):
            inputs = outputs = {"x": ("INT32", [1])}

            def load(self, context):
                self.waiting, self.all = 0, asyncio.Event()

            async def infer(self, inputs):
                assert threading.current_thread() is not threading.main_thread()
                self.waiting += 1
                if self.waiting == 20:
                    self.all.set()
                await self.all.wait()
                return {"x": inputs["x"]}
        """,
    )
    async with start() as client:
        asked = [client.infer("m", x=np.array([n], np.int32)) for n in range(20)]
        answers = await asyncio.gather(*asked)

    assert list(range(20)) == [int(answer["x"][0]) for answer in answers]


STREAMS = {
    "plain": """
        class Model(PythonModel):
            inputs = outputs = {"x": ("INT32", [1])}

            def infer(self, inputs):
                for number in range(int(inputs["x"][0])):
                    yield {"x": np.array([number], np.int32)}
        """,
    "awaits": """
        class Model(PythonModel):
            inputs = outputs = {"x": ("INT32", [1])}

            async def infer(self, inputs):
                for number in range(int(inputs["x"][0])):
                    yield {"x": np.array([number], np.int32)}
        """,
}


@pytest.mark.parametrize("kind", STREAMS)
async def test_a_generator_gives_many_answers(start: Any, root: Path, kind: str) -> None:
    write(root, "m", STREAMS[kind])
    counts = [3, 0, 40, 1]

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for count in counts:
            inputs = [given(triton, "x", np.array([count], np.int32))]
            yield {"model_name": "m", "inputs": inputs, "request_id": str(count)}

    found: dict[str, list[int]] = {str(count): [] for count in counts}
    async with start() as client:
        unary = await client.fails("m", x=np.array([1], np.int32))
        async for result, error in client.grpc.stream_infer(requests()):
            assert error is None
            found[result.get_response().id].append(int(result.as_numpy("x")[0]))
            if sum(map(len, found.values())) == sum(counts):
                break

    assert {str(count): list(range(count)) for count in counts} == found
    assert "UNIMPLEMENTED" in unary
    assert "ModelStreamInfer" in unary


LOADS = {
    "raises": (
        "    def load(self, context):\n        raise ValueError('no weights')\n",
        "model.py raised ValueError: no weights",
    ),
    "exits": (
        "    def load(self, context):\n        raise SystemExit\n",
        "model.py raised SystemExit",
    ),
    "syntax": ("    def (:\n", "model.py raised SyntaxError"),
    "imports": (
        "    import none_such_module\n",
        "model.py raised ModuleNotFoundError: No module named 'none_such_module'",
    ),
    "made": ("    def __init__(self, more):\n        pass\n", "model.py raised TypeError"),
}


async def test_what_keeps_code_from_loading_is_in_the_error_of_the_load(
    start: Any, root: Path
) -> None:
    body = "class Model(PythonModel):\n    def infer(self, inputs):\n        return {}\n"
    for name, (code, _) in LOADS.items():
        write(root, name, body + code, python_models.VECTORS)
    write(root, "none", "x = 1\n", python_models.VECTORS)
    write(root, "bare", body)
    async with start(load="none_such") as client:
        found = {name: await client.refused(name) for name in (*LOADS, "none", "bare")}

    for name, (_, expected) in LOADS.items():
        assert f"failed to load '{name}', {expected}" in found[name]
    assert (
        "expected a TritonPythonModel, or one subclass of xlaserve.PythonModel, got"
        in found["none"]
    )
    assert "the configuration must have at least one input" in found["bare"]


async def test_code_that_everybody_may_write_is_not_run(start: Any, root: Path) -> None:
    version = write_function(root, "file", "return {'y': x}")
    (version / "model.py").chmod(0o666)
    write_function(root, "directory", "return {'y': x}").chmod(0o777)
    async with start(load="none_such") as client:
        of_file, of_directory = await client.refused("file"), await client.refused("directory")

    assert "model.py is writable by everybody (mode 666)" in of_file
    assert "directory '1' is writable by everybody (mode 777)" in of_directory


async def test_code_outside_of_the_roots_is_not_run(start: Any, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("raise AssertionError('it ran')")
    write_function(root, "m", "return {'y': x}")
    (root / "m" / "1" / "model.py").unlink()
    (root / "m" / "1" / "model.py").symlink_to(outside)
    async with start(load="none_such", model_root=()) as client:
        text = await client.refused("m")

    assert "'model.py' is outside the model repository and every model_root" in text


async def test_another_name_of_the_file_is_obeyed(start: Any, root: Path) -> None:
    names = {"named": "other.py", "lost": "none.py", "led_out": "../2/model.py", "no_code": "m.txt"}
    for name, file in names.items():
        named = f'{python_models.VECTORS} default_model_filename: "{file}"'
        version = write_function(root, name, "return {'y': x}", named)
        (version / "model.py").rename(version / "other.py")
    async with start(load="named") as client:
        outputs = await client.infer("named", x=ones)
        found = {name: await client.refused(name) for name in names if name != "named"}

    assert [1, 1] == outputs["y"].tolist()
    assert "none.py is missing" in found["lost"]
    assert "expected a file of the version directory, got '../2/model.py'" in found["led_out"]
    assert "expected the name of a module, got 'm.txt'" in found["no_code"]


async def test_an_unload_cleans_up_behind_the_last_request(start: Any, root: Path) -> None:
    marker = root / "unloaded"
    write(
        root,
        "m",
        f"""
        class Model(PythonModel):
            inputs = outputs = {{"x": ("INT32", [1])}}

            def infer(self, inputs):
                return inputs

            def unload(self):
                import pathlib
                pathlib.Path({str(marker)!r}).touch()
                raise ValueError("and yet it is unloaded")
        """,
    )
    async with start() as client:
        await client.infer("m", x=np.ones(1, np.int32))
        await client.grpc.unload_model("m")

        assert marker.exists()
        assert not await client.grpc.is_model_ready("m")


async def test_the_examples_answer_their_client(serve: Serve) -> None:
    settings = {"model_control_mode": "none", "http_endpoint": "port:0"}
    async with serve(EXAMPLES, allow_python_models=True, **settings) as server:
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, str(EXAMPLES.parent / "python_client.py"), server.http or ""),
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await client.communicate()

    assert "[[2.0], [-1.5]]" == printed.decode().strip()


async def test_a_warm_up_runs_the_code_and_its_failure_is_that_of_the_load(
    start: Any, root: Path
) -> None:
    sample = """model_warmup { name: "sample" batch_size: 1 inputs { key: "x" value {
        data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } } }"""
    for name, body in (
        ("runs", "assert not x.any(); return {'y': x}"),
        ("fails", "raise KeyError"),
    ):
        write_function(root, name, body, python_models.VECTORS + sample)
    async with start(load="runs") as client:
        outputs = await client.infer("runs", x=np.zeros(2, np.float32))
        text = await client.refused("fails")

    assert [0, 0] == outputs["y"].tolist()
    assert "KeyError" in text


async def test_a_python_model_is_a_step_of_an_ensemble(start: Any, root: Path) -> None:
    write_function(root, "double", "return {'y': x * 2}")
    steps = "".join(
        f'step {{ model_name: "double" model_version: -1 input_map {{ key: "x" value: "{a}" }} '
        f'output_map {{ key: "y" value: "{b}" }} }}'
        for a, b in (("x", "t"), ("t", "y"))
    )
    (root / "twice").mkdir()
    (root / "twice" / "config.pbtxt").write_text(
        f'platform: "ensemble"\n{python_models.VECTORS} ensemble_scheduling {{ {steps} }}'
    )
    async with start() as client:
        outputs = await client.infer("twice", x=ones)

    assert [4, 4] == outputs["y"].tolist()
