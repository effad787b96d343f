"""Write small ONNX models with the usual exporters, for the tests.

    pip install PACKAGES onnxruntime
    python tools/make_exporter_models.py EXPORTER

EXPORTER is one of these, with the packages that it needs; their requirements on numpy and protobuf
conflict, so each needs a separate environment:

    torch         torch onnx onnxscript
    tensorflow    tensorflow-cpu tf2onnx
    scikit-learn  scikit-learn skl2onnx
    boosted       xgboost-cpu lightgbm onnxmltools scikit-learn
    paddle        paddlepaddle paddle2onnx

Each file in tests/data/exporters is a model as the exporter wrote it, stored with inputs and
onnxruntime's answers; `written.json` lists the versions that wrote it. The tests read these files
without the packages, so they are written only once.
"""

# pyright: reportMissingImports=false

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

TARGET = Path(__file__).parents[1] / "tests" / "data" / "exporters"
WRITTEN = TARGET / "written.json"
_BATCH = 3


@dataclass(frozen=True)
class Made:
    """One model as an exporter wrote it."""

    name: str
    model: bytes
    inputs: Mapping[str, Any]
    how: str
    """The function that wrote it, and the requested opset."""


def _floats(*shape: int) -> Any:
    return np.random.default_rng(11).standard_normal(shape).astype(np.float32)


def _read(write: Callable[[str], object]) -> bytes:
    """Call a function with a temporary path, and return the model it writes there."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.onnx"
        write(str(path))
        return path.read_bytes()


# --- PyTorch -----------------------------------------------------------------------------------


def _torch_networks() -> Mapping[str, tuple[Any, Any]]:
    """Return networks with an input each: for images, for tokens, for sequences."""
    import torch
    from torch import nn

    class Image(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish())
            self.depthwise = nn.Conv2d(8, 8, 5, padding=2, groups=8)
            self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid())
            self.head = nn.Linear(16, 5)

        def forward(self, x: Any) -> Any:
            found = self.stem(x)
            found = found + self.depthwise(found) * self.squeeze(found)
            wide = nn.functional.interpolate(found, scale_factor=2.0, mode="bilinear")
            pooled = nn.functional.max_pool2d(wide, 3, 2, 1)
            joined = torch.cat([pooled, found], 1).mean((2, 3))
            return self.head(joined).softmax(-1)

    class Tokens(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 16)
            self.layer = nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", batch_first=True)

        def forward(self, x: Any) -> Any:
            places = torch.arange(x.shape[1], device=x.device)
            found = self.layer(self.words(x) + (places[None, :, None] % 3))
            return torch.where((x > 0)[..., None], found, torch.zeros_like(found)).sum(1)

    class Steps(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 5, bidirectional=True, batch_first=True)
            self.gru = nn.GRU(10, 4, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.gru(self.lstm(x)[0])[0]

    torch.manual_seed(0)
    ids = np.random.default_rng(2).integers(0, 20, (_BATCH, 7))
    return {
        "image": (Image().eval(), torch.from_numpy(_floats(_BATCH, 3, 16, 16))),
        "tokens": (Tokens().eval(), torch.from_numpy(ids)),
        "steps": (Steps().eval(), torch.from_numpy(_floats(_BATCH, 6, 6))),
    }


_SCRIPTED = ((13, "image"), (17, "image"), (17, "tokens"), (17, "steps"))
_DYNAMO = ((18, "image"), (18, "tokens"), (18, "steps"), (20, "image"), (23, "tokens"))


def _torch() -> Iterator[Made]:
    import torch

    networks = _torch_networks()
    for opset, name in _SCRIPTED:
        network, x = networks[name]
        yield Made(
            f"torchscript-{opset}-{name}",
            _read(
                lambda path, network=network, x=x, opset=opset: torch.onnx.export(  # type: ignore[misc]
                    network,
                    (x,),
                    path,
                    dynamo=False,
                    opset_version=opset,
                    input_names=["x"],
                    output_names=["y"],
                    dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}},
                )
            ),
            {"x": x.numpy()},
            f"torch.onnx.export(dynamo=False, opset_version={opset})",
        )
    for opset, name in _DYNAMO:
        network, x = networks[name]
        yield Made(
            f"dynamo-{opset}-{name}",
            _read(
                lambda path, network=network, x=x, opset=opset: torch.onnx.export(  # type: ignore[misc]
                    network,
                    (x,),
                    path,
                    dynamo=True,
                    opset_version=opset,
                    input_names=["x"],
                    output_names=["y"],
                    dynamic_shapes=({0: torch.export.Dim("batch")},),
                    external_data=False,
                )
            ),
            {"x": x.numpy()},
            f"torch.onnx.export(dynamo=True, opset_version={opset})",
        )


# --- TensorFlow --------------------------------------------------------------------------------


def _tensorflow() -> Iterator[Made]:
    import tensorflow as tf
    import tf2onnx

    tf.random.set_seed(0)
    layers = tf.keras.layers
    image = tf.keras.Sequential(
        [
            layers.Input((16, 16, 3)),
            layers.Conv2D(8, 3, strides=2, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(6.0),
            layers.DepthwiseConv2D(3, padding="same"),
            layers.UpSampling2D(2, interpolation="bilinear"),
            layers.AveragePooling2D(2, padding="same"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5, activation="softmax"),
        ]
    )
    steps = tf.keras.Sequential(
        [
            layers.Input((6, 6)),
            layers.LSTM(5, return_sequences=True),
            layers.LayerNormalization(),
            layers.GRU(4),
        ]
    )
    cases = {
        "image": (image, _floats(_BATCH, 16, 16, 3), (13, 18)),
        "steps": (steps, _floats(_BATCH, 6, 6), (15,)),
    }
    for name, (network, x, opsets) in cases.items():
        signature = [tf.TensorSpec([None, *x.shape[1:]], tf.float32, name="x")]
        function = tf.function(lambda x, network=network: network(x, training=False))
        for opset in opsets:
            made, _ = tf2onnx.convert.from_function(
                function, input_signature=signature, opset=opset
            )
            how = f"tf2onnx.convert.from_function(opset={opset})"
            yield Made(f"tf2onnx-{opset}-{name}", made.SerializeToString(), {"x": x}, how)


# --- Tabular models ----------------------------------------------------------------------------


def _table() -> tuple[Any, Any, Any]:
    """Return rows of four columns, labels of three classes, and numbers."""
    random = np.random.default_rng(3)
    rows = random.standard_normal((200, 4)).astype(np.float32)
    rows[:, 3] = random.integers(0, 6, len(rows))
    three = (rows[:, 0] > 0).astype(np.int64) + (rows[:, 1] > 0)
    return rows, three, rows[:, 0] * 2 + rows[:, 1] ** 2 + rows[:, 3] % 3


def _scikit_learn() -> Iterator[Made]:
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType, Int64TensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler
    from sklearn.svm import SVC

    rows, three, _ = _table()
    whole = np.rint(rows * 3).astype(np.int64)
    scaled = make_pipeline(StandardScaler(), LogisticRegression())
    columns = make_pipeline(
        ColumnTransformer(
            [("numbers", StandardScaler(), [0, 1, 2]), ("kinds", OneHotEncoder(), [3])]
        ),
        LogisticRegression(),
    )
    cases = (
        ("doubles", 15, scaled, rows.astype(np.float64), DoubleTensorType),
        ("integers", 17, LogisticRegression(), whole, Int64TensorType),
        ("columns", 21, columns, whole, Int64TensorType),
        ("reduced", 21, make_pipeline(PCA(2), SVC(kernel="rbf")), rows, FloatTensorType),
    )
    for name, opset, estimator, given, kind in cases:
        estimator.fit(given, three)
        types: Any = [("x", kind([None, given.shape[1]]))]
        opsets = {"": opset, "ai.onnx.ml": 3}
        # onnxruntime does not support ZipMap with doubles.
        options = {"zipmap": False} if kind is DoubleTensorType else None
        made: Any = to_onnx(estimator, initial_types=types, target_opset=opsets, options=options)
        how = f"skl2onnx.to_onnx(target_opset={opset})"
        yield Made(f"skl2onnx-{opset}-{name}", made.SerializeToString(), {"x": given[:9]}, how)


def _boosted() -> Iterator[Made]:
    import lightgbm
    import xgboost
    from onnxmltools.convert import convert_lightgbm, convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType

    rows, three, numbers = _table()
    rows[::7, 1] = np.nan
    types = [("x", FloatTensorType([None, rows.shape[1]]))]
    said: dict[str, Any] = {"n_estimators": 5, "max_depth": 3}
    cases = (
        ("xgboost", convert_xgboost, xgboost.XGBClassifier(**said), three),
        ("lightgbm", convert_lightgbm, lightgbm.LGBMRegressor(**said, verbose=-1), numbers),
    )
    for name, convert, estimator, wanted in cases:
        made = convert(estimator.fit(rows, wanted), initial_types=types, target_opset=15)
        how = f"onnxmltools.convert.convert_{name}(target_opset=15)"
        yield Made(f"{name}-15-table", made.SerializeToString(), {"x": rows[:9]}, how)


# --- Paddle ------------------------------------------------------------------------------------


def _paddle() -> Iterator[Made]:
    import paddle
    from paddle import nn

    paddle.seed(0)
    image = nn.Sequential(
        nn.Conv2D(3, 8, 3, 2, 1),
        nn.BatchNorm2D(8),
        nn.Hardswish(),
        nn.Conv2D(8, 8, 3, padding=1, groups=8),
        nn.ReLU6(),
        nn.AdaptiveAvgPool2D(1),
        nn.Flatten(),
        nn.Linear(8, 5),
        nn.Softmax(),
    )
    image.eval()
    for opset in (13, 16):
        spec = [paddle.static.InputSpec([None, 3, 16, 16], "float32", "x")]
        made = _read(
            lambda path, opset=opset, spec=spec: paddle.onnx.export(  # type: ignore[misc]
                image, path.removesuffix(".onnx"), input_spec=spec, opset_version=opset
            )
        )
        how = f"paddle.onnx.export(opset_version={opset})"
        yield Made(f"paddle2onnx-{opset}-image", made, {"x": _floats(_BATCH, 3, 16, 16)}, how)


_EXPORTERS: Mapping[str, tuple[Callable[[], Iterator[Made]], tuple[str, ...]]] = {
    "torch": (_torch, ("torch", "onnxscript", "onnx")),
    "tensorflow": (_tensorflow, ("tensorflow-cpu", "tf2onnx", "onnx")),
    "scikit-learn": (_scikit_learn, ("scikit-learn", "skl2onnx", "onnx")),
    "boosted": (_boosted, ("xgboost-cpu", "lightgbm", "onnxmltools", "onnx")),
    "paddle": (_paddle, ("paddlepaddle", "paddle2onnx", "onnx")),
}
"""The models of each exporter, and the packages whose versions are recorded."""


def _write(made: Made, packages: tuple[str, ...]) -> None:
    """Write a model, its inputs, onnxruntime's answers, and a description."""
    import onnxruntime

    session = onnxruntime.InferenceSession(made.model, providers=["CPUExecutionProvider"])
    # ZipMap returns lists of maps, which are not tensors: use its input instead, as the import
    # does.
    kinds = {item.name: item.type for item in session.get_outputs()}
    names = [name for name, kind in kinds.items() if kind.startswith("tensor")]
    answers = dict(zip(names, session.run(names, dict(made.inputs)), strict=True))
    (TARGET / f"{made.name}.onnx").write_bytes(made.model)
    kept = {f"in.{name}": value for name, value in made.inputs.items()}
    kept |= {f"out.{name}": value for name, value in answers.items()}
    np.savez_compressed(TARGET / f"{made.name}.npz", **kept)
    lines = json.loads(WRITTEN.read_text()) if WRITTEN.exists() else {}
    used = (*packages, "onnxruntime")
    lines[made.name] = {"by": made.how, "with": [f"{name}=={version(name)}" for name in used]}
    WRITTEN.write_text(json.dumps(lines, indent=1, sort_keys=True) + "\n")
    print(f"{made.name}: {len(made.model)} bytes")


def main() -> None:
    """Write the models of one exporter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exporter", choices=_EXPORTERS)
    models, packages = _EXPORTERS[parser.parse_args().exporter]
    TARGET.mkdir(exist_ok=True)
    for made in models():
        _write(made, packages)


if __name__ == "__main__":
    main()
