"""Hostile, old or foreign archives and programs are refused by name, without running code."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.pt2_models import PROGRAM, Json, changed, files_of, packed, path, read

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2 import archive

WEIGHTS = "data/weights/model_weights_config.json"


def test_tensors_are_views_of_the_mapped_file() -> None:
    found = archive.open_file(path("mlp")).tensors

    assert not any(array.flags.owndata or array.flags.writeable for array in found.values())


def test_an_archive_that_was_packed_again_is_read() -> None:
    files = files_of("mlp")

    found = read(packed(files, zipfile.ZIP_DEFLATED)).tensors
    expected = archive.open_file(path("mlp")).tensors

    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(array, found[name])


def _payload(tree: Json, name: str = "0.weight") -> Json:
    payload: Json = tree["config"][name]
    return payload


def _meta(field: str, value: object) -> Callable[[Json], object]:
    return lambda tree: _payload(tree)["tensor_meta"].update({field: value})


def _ints(*values: int) -> list[Json]:
    return [{"as_int": value} for value in values]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tree: _payload(tree).update(use_pickle=True), "'0.weight' is a pickle"),
        (lambda tree: _payload(tree).update(tensor_meta=None), "'0.weight' is a pickle"),
        (lambda tree: _payload(tree).update(path_name="../x"), "expected a plain file name"),
        (lambda tree: _payload(tree).update(path_name="weight_9"), "it has no entry"),
        (lambda tree: tree["config"].pop("0.weight"), "'0.weight' is missing from"),
        (_meta("storage_offset", {"as_int": 1}), "needs 260 bytes, got 256"),
        (_meta("strides", _ints(4, 2)), "bytes, got 256"),
        (_meta("sizes", _ints(16, 2**62)), "bytes, got 256"),
        (_meta("sizes", _ints(-16, 4)), "negative"),
        (_meta("sizes", _ints(16)), "1 sizes and 2 strides"),
        (_meta("sizes", _ints(4, 16)), "the program expects float32 .16, 4., the archive has"),
        (_meta("dtype", 8), "needs 512 bytes"),
        (_meta("dtype", 10), "complex float: expected one of"),
        (_meta("layout", 1), "layout 1, expected a strided one"),
        (_meta("strides", _ints(0, 0)), ""),
        (
            lambda tree: _payload(tree)["tensor_meta"].update(
                sizes=_ints(2**20, 2**20), strides=_ints(0, 0)
            ),
            "exceeds its 256 bytes",
        ),
        (
            lambda tree: _payload(tree)["tensor_meta"].update(
                sizes=_ints(0, 2**62), strides=_ints(1, 1)
            ),
            "has no elements, but sizes above",
        ),
        (lambda tree: _payload(tree).update(color="red"), "unknown field `color`"),
    ],
)
def test_a_tensor_that_lies_is_refused(change: Callable[[Json], object], text: str) -> None:
    data = changed("mlp", change, WEIGHTS)
    if not text:  # strides of 0 within the bytes that are there are what `expand` writes
        assert {0} == set(read(data).tensors["p_0_weight"].strides)
        return
    with pytest.raises(InvalidModel, match=text):
        read(data)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"serialized_exported_program.json": b"{}"}, "PyTorch 2.8 or older"),
        ({"data.pkl": b""}, "torch.save .* pickles"),
        ({"archive_format": b"zip"}, "expected 'pt2', got 'zip'"),
        ({"archive_version": b"1"}, "expected '0', got '1'"),
        ({"byteorder": b"big"}, "expected 'little', got 'big'"),
        ({"models/other.json": b"{}"}, "several programs, model, other"),
        ({"data/weights/model.pt": b""}, "its weights are a pickle"),
        ({WEIGHTS: b"[]"}, "cannot be read"),
        ({WEIGHTS: b"[" * 100_000}, "cannot be read"),
        ({PROGRAM: b'{"a":' * 100_000}, "cannot be read|too deep"),
        ({PROGRAM: b"\xff"}, "cannot be read"),
    ],
)
def test_another_archive_is_refused(files: dict[str, bytes], text: str) -> None:
    with pytest.raises(InvalidModel, match=text):
        read(packed({**files_of("mlp"), **files}))


def test_an_archive_of_a_compiler_is_refused() -> None:
    files = {n: d for n, d in files_of("mlp").items() if not n.startswith("models/")}

    with pytest.raises(
        InvalidModel,
        match="it was compiled by AOTInductor and has no program: save the result of"
        " torch.export.export with torch.export.save",
    ):
        read(packed({**files, "data/aotinductor/model/a.so": b""}))


def test_a_pickle_in_any_file_is_never_run(tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.mkdir, (tmp_path / "sung",)

    canary = pickle.dumps(Canary())
    # Whatever is as long as a weight of FP32 is one; a pickle ends before what is behind it.
    canary += bytes(1 + -len(canary) % 4)
    assert len(canary) % 4 == 1
    for name in files_of("mlp"):
        try:
            read(packed({**files_of("mlp"), name: canary}))
        except InvalidModel:
            continue
        assert name.startswith(("data/sample_inputs/", ".data/"))
    assert not (tmp_path / "sung").exists()


# --- programs ----------------------------------------------------------------------------------


def _graph(tree: Json) -> Json:
    graph: Json = tree["graph_module"]["graph"]
    return graph


def _node(tree: Json, place: int = 0) -> Json:
    node: Json = _graph(tree)["nodes"][place]
    return node


def _signature(tree: Json) -> Json:
    signature: Json = tree["graph_module"]["signature"]
    return signature


def _argument(tree: Json, value: Json) -> None:
    _node(tree)["inputs"][0]["arg"] = value


def _mutated(kind: str, **fields: str) -> Callable[[Json], object]:
    spec = {kind: {"arg": {"name": "linear_1"}, **fields}}
    return lambda tree: _signature(tree)["output_specs"].__setitem__(0, spec)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t["schema_version"].update(major=9), "schema 9"),
        (lambda t: t["opset_version"].update(quantized=1), "opset 'quantized' 1"),
        (lambda t: t.update(verifiers=["EDGE"]), "dialect 'EDGE'"),
        (lambda t: t.update(novelty=1), "unknown field `novelty`"),
        (lambda t: _node(t).update(novelty=1), "unknown field `novelty`"),
        (lambda t: _graph(t)["nodes"].reverse(), "reads '.*', which no earlier node computes"),
        (
            lambda t: _node(t, 1).update(outputs=[{"as_tensor": {"name": "linear"}}]),
            "'linear', which already exists",
        ),
        (
            lambda t: _graph(t)["outputs"].__setitem__(0, {"as_tensor": {"name": "z"}}),
            "no node computes the output 'z'",
        ),
        (lambda t: _argument(t, {}), "expected one field of a union, got none"),
        (lambda t: _argument(t, {"as_int": 1, "as_bool": True}), "expected one field of a union"),
        (lambda t: _argument(t, {"as_operator": "os.system"}), "'as_operator' is not implemented"),
        (lambda t: _argument(t, {"as_float": "much"}), "expected a number, got 'much'"),
        (lambda t: _argument(t, {"as_int": 2**70}), "cannot be read"),
        (lambda t: _argument(t, {"as_scalar_type": 9}), "complex half"),
        (lambda t: _graph(t)["tensor_values"]["x"].update(layout=2), "layout 2"),
        (lambda t: t["range_constraints"].update(s={"min_val": 5, "max_val": 2}), "5 to 2"),
        (_mutated("buffer_mutation", buffer_name="count"), "changes its buffer 'count'"),
        (_mutated("user_input_mutation", user_input_name="x"), "changes its input 'x'"),
        (lambda t: _signature(t)["input_specs"].pop(), "the signature has 4 inputs"),
        (
            lambda t: _signature(t)["input_specs"].__setitem__(
                4, {"token": {"arg": {"name": "input"}}}
            ),
            "'token' is not implemented",
        ),
        (
            lambda t: _graph(t)["custom_obj_values"].update(
                o={"name": "o", "class_fqn": "__torch__.torch.classes.x"}
            ),
            "C\\+\\+ object",
        ),
    ],
)
def test_a_program_that_cannot_be_obeyed_is_refused(
    change: Callable[[Json], object], text: str
) -> None:
    def known(tree: Json) -> None:
        values = _graph(tree)["tensor_values"]
        values["x"] = values["input"]
        change(tree)

    with pytest.raises(InvalidModel, match=text):
        read(changed("mlp", known))


def test_a_program_that_is_too_large_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_PROGRAM_BYTES", 1000)

    with pytest.raises(InvalidModel, match="more than the 1000 allowed"):
        read(packed(files_of("mlp")))


def test_graphs_within_graphs_have_a_limit() -> None:
    """Even at a small depth; no recursion crashes the process."""
    empty = '"inputs":[],"outputs":[],"tensor_values":{},"sym_int_values":{},"sym_bool_values":{}'
    before = '"as_graph":{"name":"g","graph":{' + empty + ',"nodes":[{"target":"t","metadata":{},'
    before += '"outputs":[],"inputs":[{"name":"","arg":{'
    text = before * 20_000 + '"as_none":true' + "}}]}]}}" * 20_000
    program = files_of("mlp")[PROGRAM].decode()
    deep = program.replace('"as_tensor": {"name": "input"}', text)

    assert deep != program
    with pytest.raises(InvalidModel, match="too deep|cannot be read"):
        read(packed({**files_of("mlp"), PROGRAM: deep.encode()}))
