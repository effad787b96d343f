"""Classifiers with text classes: imported with numeric outputs and a labels file, and compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

import onnx
from onnx import TensorProto, helper, numpy_helper
from support.onnx_models import FLOAT, INT64, graph_of, model, node, save

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import configuring
from xlaserve.importers.onnx.checking import numbers_of
from xlaserve.importers.onnx.importing import Options, import_model
from xlaserve.importers.onnx.labels import with_numbers
from xlaserve.model_config.text import read_config

CLASSES = ("low", "übermäßig", "a b")


def _classifier(classes: Sequence[str] = CLASSES, operator: str = "LinearClassifier") -> Any:
    """Return a model with text labels and a list of maps of scores."""
    count = len(classes)
    said: dict[str, Any] = {
        "coefficients": np.linspace(-1, 1, 4 * count).tolist(),
        "classlabels_strings": list(classes),
    }
    said |= (
        {"intercepts": [0.0] * count}
        if operator == "LinearClassifier"
        else {"rho": [0.0], "kernel_params": [0.0] * 3}
    )
    nodes = [
        helper.make_node(operator, ["x"], ["label", "s"], domain="ai.onnx.ml", **said),
        helper.make_node(
            "ZipMap", ["s"], ["scores"], domain="ai.onnx.ml", classlabels_strings=list(classes)
        ),
    ]
    kinds = [
        helper.make_tensor_value_info("label", TensorProto.STRING, [None]),
        helper.make_value_info(
            "scores",
            helper.make_sequence_type_proto(
                helper.make_map_type_proto(
                    TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
                )
            ),
        ),
    ]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 4])], kinds
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _looked_up(*after: Any, classes: Sequence[str] = CLASSES) -> Any:
    """Return a model that looks its label up in a list, as naive Bayes does."""
    table = numpy_helper.from_array(np.asarray(classes, np.object_), "classes")
    extract = helper.make_node(
        "ArrayFeatureExtractor", ["classes", "i"], ["found"], domain="ai.onnx.ml"
    )
    nodes = [
        node("ArgMax", ["x"], ["i"], axis=1, keepdims=0),
        extract,
        *after,
    ]
    made = model(nodes, {"x": (FLOAT, ["N", 3])}, [nodes[-1].output[0]])
    made.graph.initializer.append(table)
    made.graph.initializer.append(numpy_helper.from_array(np.asarray([-1], np.int64), "flat"))
    made.graph.output[0].CopyFrom(
        helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.STRING, [None])
    )
    return made


def test_a_classifier_of_texts_is_imported_with_a_list_of_them(tmp_path: Path) -> None:
    """Its labels match onnxruntime's, and both outputs have labels."""
    imported = import_model(save(_classifier(), tmp_path), tmp_path / "m")

    assert ["INT64[-1]", "FP32[-1,3]"] == [str(spec) for spec in imported.manifest.outputs]
    assert imported.checked is not None
    assert "class names of 'label', 'scores' are in labels.txt" in imported.labels
    assert "\n".join(CLASSES) + "\n" == (tmp_path / "m/labels.txt").read_text("utf-8")
    config = read_config(tmp_path / "m", limit_bytes=10_000).message
    assert config is not None
    assert ["labels.txt", "labels.txt"] == [output.label_filename for output in config.output]
    assert (32, [[], [3]]) == (config.max_batch_size, [list(one.dims) for one in config.output])


def test_a_list_that_is_looked_into_is_a_list_of_classes(tmp_path: Path) -> None:
    made = _looked_up(node("Reshape", ["found", "flat"], ["label"]))

    imported = import_model(save(made, tmp_path), tmp_path / "m")

    assert "class names of 'label' are in labels.txt" in imported.labels
    assert imported.checked is not None
    assert 0 == imported.checked.worst.absolute


def test_labels_that_differ_from_onnxruntime_are_seen() -> None:
    texts = np.asarray([["a", "b"], ["c", "a"]], np.object_)

    assert [[0, 1], [-1, 0]] == numbers_of(texts, ("a", "b")).tolist()


def test_pairs_of_classes_are_no_classes(tmp_path: Path) -> None:
    """An SVM of three classes has a score for each of three pairs."""
    made = _classifier(operator="SVMClassifier")

    imported = import_model(save(made, tmp_path), tmp_path / "m")

    assert "class names of 'label' are in labels.txt" in imported.labels


@pytest.mark.parametrize("file", [configuring.FILE_NAME, configuring.CONFIG_NAME])
def test_no_file_is_overwritten(tmp_path: Path, file: str) -> None:
    """A second version with the same classes changes nothing, and other files are kept."""
    path = save(_classifier(), tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / file).write_text("# mine\n")

    said = import_model(path, tmp_path / "m").labels

    assert "# mine\n" == (tmp_path / "m" / file).read_text()
    assert ("a different labels.txt exists" in said) == (file == configuring.FILE_NAME)
    assert ('add label_filename: "labels.txt"' in said) == (file == configuring.CONFIG_NAME)


def test_the_next_version_keeps_the_files(tmp_path: Path) -> None:
    path = save(_classifier(), tmp_path)

    first, second = (import_model(path, tmp_path / "m").labels for _ in range(2))

    assert first == second


@pytest.mark.parametrize(
    "made",
    [
        _looked_up(node("Equal", ["found", "found"], ["label"])),
        _looked_up(node("Cast", ["found"], ["label"], to=INT64)),
        _looked_up(node("Gather", ["found", "found"], ["label"])),
        _looked_up(node("Identity", ["found"], ["label"]), classes=("a", "b", "a")),
        _looked_up(node("Identity", ["found"], ["label"]), classes=("a", "b\nc", "d")),
        _looked_up(node("Identity", ["found"], ["label"]), classes=("a", "b\n", "d")),
        _looked_up(node("Identity", ["found"], ["label"]), classes=("a", "", "d")),
    ],
    ids=["compared", "cast", "index", "twice", "two lines", "a line more", "no line"],
)
def test_texts_that_are_more_than_moved_stay_texts(made: onnx.ModelProto) -> None:
    """The graph does more than copy the label, or its texts do not fit the lines of labels.txt."""
    graph = graph_of(made)

    assert (graph, {}) == with_numbers(graph)


def test_a_label_that_is_no_number_is_refused_by_node(tmp_path: Path) -> None:
    path = save(_classifier(("a", "a", "b")), tmp_path)

    with pytest.raises(
        InvalidModel,
        match="LinearClassifier 'label'.*its labels are strings; keep only its other outputs",
    ):
        import_model(path, tmp_path / "m")
    imported = import_model(path, tmp_path / "m", Options(outputs=["scores"], check=False))

    assert ["FP32[-1,3]"] == [str(spec) for spec in imported.manifest.outputs]
    assert "" == imported.labels


IMAGES = {"image_mean": "0.5,0.4,0.3", "image_resize": "crop"}
"""Parameters of a configuration, whatever they mean."""


def _scores(directory: Path) -> Path:
    """Write a model with a score for each of three classes."""
    relu = node("Relu", ["x"], ["scores"])
    return save(model([relu], {"x": (FLOAT, ["N", 3])}, ["scores"]), directory)


def test_labels_and_parameters_that_are_given_are_written(tmp_path: Path) -> None:
    options = Options(labels=CLASSES, parameters=IMAGES)
    said = import_model(_scores(tmp_path), tmp_path / "m", options).labels
    config = read_config(tmp_path / "m", limit_bytes=10_000)

    assert "class names of 'scores' are in labels.txt" in said
    assert "images are preprocessed with image_mean 0.5,0.4,0.3, image_resize crop" in said
    assert IMAGES == dict(config.parameters)
    assert config.message is not None
    assert ["labels.txt"] == [output.label_filename for output in config.message.output]


def test_parameters_alone_are_written(tmp_path: Path) -> None:
    said = import_model(_scores(tmp_path), tmp_path / "m", Options(parameters=IMAGES)).labels
    again = import_model(_scores(tmp_path), tmp_path / "m", Options(parameters={"a": "1"})).labels

    assert said.startswith("images are preprocessed with")
    assert not (tmp_path / "m" / configuring.FILE_NAME).exists()
    assert again.endswith("add these parameters to the existing config.pbtxt")
    assert IMAGES == dict(read_config(tmp_path / "m", limit_bytes=10_000).parameters)


def test_labels_of_another_number_are_refused(tmp_path: Path) -> None:
    text = r"got 2, but no output has that many classes, only 'scores' FP32\[-1,3\]"
    with pytest.raises(InvalidModel, match=text):
        import_model(_scores(tmp_path), tmp_path / "m", Options(labels=("a", "b")))
    assert not (tmp_path / "m" / "1").exists()
