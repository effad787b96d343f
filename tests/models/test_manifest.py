import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.artifact import manifest
from xlaserve.artifact.manifest import ARTIFACT, FILE_NAME, STABLEHLO, WEIGHTS, Durable, Manifest
from xlaserve.artifact.target_sizes import TargetSizes
from xlaserve.errors import InvalidModel
from xlaserve.files.files import FileRecord
from xlaserve.row_proofs.verdict import Independence, Verdict
from xlaserve.tensors import DATATYPES, TensorSpec

Change: TypeAlias = Callable[[dict[str, Any]], object]

FP32 = DATATYPES["FP32"]


def _manifest() -> Manifest:
    return Manifest(
        inputs=(TensorSpec("z", FP32, (-1, 4)), TensorSpec("a b", DATATYPES["BOOL"], (-1,))),
        outputs=(TensorSpec("y", DATATYPES["INT64"], (-1, 2)),),
        max_batch_size=8,
        parameters=("w", "layers/0/b"),
        parameters_bytes=24,
        files={ARTIFACT: FileRecord(3, "ab" * 32), WEIGHTS: FileRecord(5, "cd" * 32)},
        platforms=("cpu", "cuda"),
        jax_version="0.9.2",
        exported_at="2026-01-31T00:00:00Z",
    )


def _lasting() -> Manifest:
    durable = Durable(
        calling_convention=10,
        is_open=True,
        arguments=("float32[3]", "float32[]", "float32[b, 4]", "bool[b]"),
        results=("int64[b, 2]",),
        unused=(1,),
    )
    files = {**_manifest().files, STABLEHLO: FileRecord(7, "ef" * 32)}
    return dataclasses.replace(_manifest(), durable=durable, files=files)


def _written(directory: Path) -> dict[str, Any]:
    manifest.write(directory, _manifest())
    document: dict[str, Any] = json.loads((directory / FILE_NAME).read_text())
    return document


def _sizes(**changes: int) -> dict[str, int]:
    return {"parameters_bytes": 24, "scratch_bytes": 1, "programs_bytes": 2, **changes}


def test_reading_gives_what_was_written(tmp_path: Path) -> None:
    manifest.write(tmp_path, _manifest())

    assert _manifest() == manifest.read(tmp_path)


def test_reading_gives_the_durable_part_that_was_written(tmp_path: Path) -> None:
    manifest.write(tmp_path, _lasting())

    assert _lasting() == manifest.read(tmp_path)


def test_format_is_the_oldest_that_can_say_it(tmp_path: Path) -> None:
    assert (1, False) == (_written(tmp_path)["format_version"], "durable" in _written(tmp_path))
    manifest.write(tmp_path, _lasting())
    assert 2 == json.loads((tmp_path / FILE_NAME).read_text())["format_version"]


def _set_durable(**fields: object) -> Change:
    return lambda document: document["durable"].update(fields)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_set_durable(surprise=1), "unknown field `surprise`"),
        (_set_durable(arguments=["float32[3]"]), "durable has 1 arguments, expected 4"),
        (_set_durable(results=[]), "durable has 0 results, expected 1"),
        (_set_durable(unused=[4]), "durable.unused has an index that is not among its"),
        (_set_durable(unused=[-1]), "durable.unused has an index that is not among its"),
        (_set_durable(is_open=1), "Expected `bool`, got `int`"),
        (
            lambda document: document["files"].pop(STABLEHLO),
            "expected the files ['model.jaxexp', 'model.stablehlo', 'params.safetensors'], got",
        ),
        (lambda document: document.pop("durable"), "expected the files ['model.jaxexp', 'params."),
    ],
)
def test_bad_durable_part_is_refused(tmp_path: Path, change: Change, expected: str) -> None:
    manifest.write(tmp_path, _lasting())
    document = json.loads((tmp_path / FILE_NAME).read_text())
    change(document)
    (tmp_path / FILE_NAME).write_text(json.dumps(document))

    with pytest.raises(InvalidModel) as caught:
        manifest.read(tmp_path)
    assert expected in str(caught.value)


def test_artifact_may_be_missing_where_a_durable_part_is_there(tmp_path: Path) -> None:
    files = {name: record for name, record in _lasting().files.items() if name != ARTIFACT}
    manifest.write(tmp_path, dataclasses.replace(_lasting(), files=files))

    assert {STABLEHLO, WEIGHTS} == manifest.read(tmp_path).files.keys()


def test_order_of_tensors_and_parameters_is_kept(tmp_path: Path) -> None:
    document = _written(tmp_path)

    assert ["z", "a b"] == [tensor["name"] for tensor in document["inputs"]]
    assert ["w", "layers/0/b"] == document["parameters"]


def test_same_manifest_is_the_same_bytes(tmp_path: Path) -> None:
    assert manifest.write(tmp_path, _manifest()) == manifest.write(tmp_path, _manifest())


def test_missing_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"^model\.json is missing$"):
        manifest.read(tmp_path)


def test_manifest_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b" " * (manifest.LIMIT_BYTES + 1))

    with pytest.raises(InvalidModel, match="1048577 bytes, more than the 1048576 allowed"):
        manifest.read(tmp_path)


def _set(**fields: object) -> Change:
    return lambda document: document.update(fields)


def _set_input(**fields: object) -> Change:
    return lambda document: document["inputs"][0].update(fields)


def _rename_file(document: dict[str, Any]) -> None:
    document["files"]["../escape"] = document["files"].pop(WEIGHTS)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_set(format_version=7), "has format version 7, this server reads versions 1 to 6"),
        (_set(kind="python"), "is of kind 'python', expected 'jax_export'"),
        (_set(surprise=1), "unknown field `surprise`"),
        (_set_input(surprise=1), "unknown field `surprise`"),
        (lambda document: document.pop("platforms"), "missing required field `platforms`"),
        (_set(max_batch_size="8"), "Expected `int`, got `str`"),
        (_set(max_batch_size=-1), "max_batch_size is not between 0 and 65536"),
        (_set(max_batch_size=65537), "max_batch_size is not between 0 and 65536"),
        (_set(inputs=[]), "it has no inputs"),
        (_set(outputs=[]), "it has no outputs"),
        (_set_input(name="a b"), "input 'a b' is duplicated"),
        (_set_input(name=""), "one input: expected a name of 1 to 1024 characters, got 0"),
        (_set_input(name="n" * 1025), "a name of 1 to 1024 characters, got 1025"),
        (_set_input(datatype="FP31"), "input 'z' has an unknown datatype 'FP31'"),
        (_set_input(shape=[-1, -2]), "input 'z' has an invalid shape"),
        (_set_input(shape=[-1, 1 << 31]), "input 'z' has an invalid shape"),
        (_set_input(shape=[-1] * 33), "input 'z' has an invalid shape"),
        (_set_input(shape=[4]), "'z' is FP32[4], but with batches the first dimension must be -1"),
        (_set_input(shape=[]), "'z' is FP32[], but with batches the first dimension must be -1"),
        (_set(parameters=["w", "w"]), "parameter 'w' is duplicated"),
        (_set(parameters_bytes=-1), "parameters_bytes is negative"),
        (_rename_file, "expected the files ['model.jaxexp', 'params.safetensors'], got"),
    ],
)
def test_bad_manifest_is_refused(tmp_path: Path, change: Change, expected: str) -> None:
    document = _written(tmp_path)
    change(document)
    (tmp_path / FILE_NAME).write_text(json.dumps(document))

    with pytest.raises(InvalidModel) as caught:
        manifest.read(tmp_path)
    assert str(caught.value).startswith("model.json ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 99_999, b"{} {}"])
def test_text_that_is_no_object_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(text)

    with pytest.raises(InvalidModel, match=r"^model\.json is not valid: "):
        manifest.read(tmp_path)


def test_manifest_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    fields = {"max_batch_size": 8, "inputs": (TensorSpec("x", FP32, (4,)),)}
    bad = Manifest(**{**_fields(), **fields})

    with pytest.raises(InvalidModel):
        manifest.write(tmp_path, bad)
    assert [] == list(tmp_path.iterdir())


def _fields() -> dict[str, Any]:
    return {name: getattr(_manifest(), name) for name in Manifest.__slots__}


@given(st.data())
def test_flipped_bits_and_cuts_are_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """For any bytes, reading ends with a manifest or with InvalidModel."""
    directory = tmp_path_factory.mktemp("manifest")
    manifest.write(directory, _manifest())
    content = bytearray((directory / FILE_NAME).read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(content) * 8 - 1), max_size=4)):
        content[position // 8] ^= 1 << position % 8
    (directory / FILE_NAME).write_bytes(content[: data.draw(st.integers(0, len(content)))])

    try:
        found = manifest.read(directory)
    except InvalidModel:
        return
    assert {ARTIFACT, WEIGHTS} == found.files.keys()


# --- verdicts on rows ----------------------------------------------------------------------------

VERDICT = Verdict(
    Independence.MIXED, "y", "stablehlo.sort", "sorts the rows", "model.py:7", True, True
)


@pytest.mark.parametrize(
    ("changes", "version"),
    [
        ({"verdict": VERDICT}, 4),
        ({"verdict": Verdict(Independence.PROVED)}, 4),
        ({"batch_independent": True}, 4),
        ({"max_batch_size": 0}, 4),
        ({"batch_independent": False}, 3),
        ({"sizes": {"h100": TargetSizes(24, 100, 50), "v5e": TargetSizes(0, 0, 24)}}, 5),
        ({}, 1),
    ],
)
def test_reading_gives_what_was_written_of_rows(
    tmp_path: Path, changes: dict[str, Any], version: int
) -> None:
    """Written in the oldest format version that supports the verdict."""
    written = dataclasses.replace(_manifest(), **changes)
    manifest.write(tmp_path, written)

    assert version == json.loads((tmp_path / FILE_NAME).read_text())["format_version"]
    assert written == manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"h100": [1, 2, 3]}, "Expected `object`, got `array`"),
        ({"h100": _sizes(parameters_bytes=23, programs_bytes=0)}, "sizes for 'h100' are too small"),
        ({"h100": _sizes(scratch_bytes=-1)}, "sizes for 'h100' are too small for 24 bytes"),
        (
            {"h100": _sizes(scratch_bytes=(1 << 50) + 1)},
            "sizes for 'h100' are too small for 24 bytes",
        ),
        ({"": _sizes()}, "it has sizes for a target with an invalid name"),
        ({"h" * 33: _sizes()}, "it has sizes for a target with an invalid name"),
        ({"a\nb": _sizes()}, "it has sizes for a target with an invalid name"),
        ({f"h{index}": _sizes() for index in range(33)}, "for 33 targets, expected at most 32"),
    ],
)
def test_sizes_that_no_model_has_are_refused(
    tmp_path: Path, sizes: dict[str, Any], expected: str
) -> None:
    document = {**_written(tmp_path), "format_version": 5, "sizes": sizes}
    (tmp_path / FILE_NAME).write_text(json.dumps(document))

    with pytest.raises(InvalidModel, match=expected):
        manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        ({"independence": "certain"}, "Invalid enum value 'certain'"),
        ({}, "missing required field `independence`"),
        ({"independence": "mixed", "surprise": 1}, "unknown field `surprise`"),
        (
            {"independence": "mixed", "reason": "a\nb"},
            "its verdict contains a text that is too long",
        ),
        (
            {"independence": "mixed", "output": "y" * 1025},
            "its verdict contains a text that is too long",
        ),
    ],
)
def test_bad_verdict_is_refused(tmp_path: Path, verdict: dict[str, Any], expected: str) -> None:
    document = _written(tmp_path) | {"verdict": verdict}
    (tmp_path / FILE_NAME).write_text(json.dumps(document))

    with pytest.raises(InvalidModel) as caught:
        manifest.read(tmp_path)
    assert expected in str(caught.value)


def test_inputs_are_all_open_or_none_is(tmp_path: Path) -> None:
    """This also holds without batching: an output has as many rows as the inputs."""
    document: dict[str, Any] = _written(tmp_path) | {"max_batch_size": 0}
    document["outputs"][0]["shape"] = [3, 2]
    (tmp_path / FILE_NAME).write_text(json.dumps(document))

    with pytest.raises(InvalidModel, match="but with batches the first dimension must be -1"):
        manifest.read(tmp_path)
