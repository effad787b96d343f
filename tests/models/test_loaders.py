import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from xlaserve.artifact import manifest
from xlaserve.artifact.target_sizes import TargetSizes
from xlaserve.errors import InvalidModel, LoadCancelled
from xlaserve.model_config.config import ConfigTensor, DynamicBatching, ModelConfig
from xlaserve.model_config.message import config_of
from xlaserve.runtime import loaders
from xlaserve.runtime.devices.placement import Devices
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel, Stage
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.compilation_cache import CompilationCache, Entry
from xlaserve.tensors import DATATYPES
from xlaserve_proto import inference

Load = Callable[..., LoadedModel]

_TENSOR = ConfigTensor("x", DATATYPES["FP32"], (4,))
_IDENTITY = ModelConfig(backend="identity", inputs=(_TENSOR,), outputs=(_TENSOR,))


class _Processes:
    """Stand-in for the pool of compiler processes."""

    def __init__(self) -> None:
        self.started: list[float] = []

    def start_ahead(self, seconds: float) -> None:
        self.started.append(seconds)


@pytest.mark.parametrize(
    ("platform", "cached", "started"),
    [("cpu", None, [60.0]), ("cpu", 0, [60.0]), ("cpu", 1, []), ("cuda", None, [])],
)
def test_a_start_takes_from_the_first_load_what_no_cache_may_spare_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    cached: int | None,
    started: list[float],
) -> None:
    """Imports the loader and starts a compiler process; not needed with accelerators."""
    cache = None if cached is None else CompilationCache(tmp_path, 10_000)
    if cache is not None:
        cache.prepare("cpu")
        for number in range(cached or 0):
            cache.write("cpu", str(number), Entry({}, {}, b"program"))
    imported: list[str] = []
    monkeypatch.setattr("importlib.import_module", imported.append)
    processes = _Processes()
    loaders.prepare(Compilation(cache, processes=processes), platform)  # type: ignore[arg-type]
    loaders.prepare(Compilation(cache), platform)

    assert started == processes.started
    assert ["xlaserve.runtime.exported.jax_export"] * 2 == imported


def test_directory_with_a_manifest_is_an_exported_model(affine_directory: Path, load: Load) -> None:
    assert "jax_export" == load(affine_directory).info.platform


@pytest.mark.parametrize("field", ["backend", "platform"])
def test_configuration_may_name_the_kind(affine_directory: Path, load: Load, field: str) -> None:
    config = ModelConfig(**{field: "jax_export"})  # type: ignore[arg-type]

    assert "jax_export" == load(affine_directory, config).info.platform


def test_identity_needs_no_files(tmp_path: Path, load: Load) -> None:
    assert "identity" == load(tmp_path / "nowhere", _IDENTITY).info.platform
    assert {"cpu:0": 0} == loaders.predict_size(tmp_path / "nowhere", _IDENTITY)


def test_unknown_backend_is_refused(affine_directory: Path, load: Load) -> None:
    with pytest.raises(InvalidModel) as caught:
        load(affine_directory, ModelConfig(backend="lua"))
    assert (
        "unknown backend 'lua' in the configuration, expected 'jax_export', 'generator', 'python', "
        "'identity'"
    ) == str(caught.value)


@pytest.mark.parametrize(
    ("backend", "name", "expected"),
    [
        ("", "model.plan", "one of model.jaxexp, model.json, model.stablehlo"),
        ("identity", "model.onnx", "none"),
    ],
)
def test_a_file_that_would_not_be_loaded_is_refused(
    affine_directory: Path, tmp_path: Path, load: Load, backend: str, name: str, expected: str
) -> None:
    (tmp_path / "model.py").write_text("")
    config = ModelConfig(backend=backend, default_model_filename=name)
    with pytest.raises(InvalidModel, match=f"^default_model_filename: expected {expected}"):
        load(tmp_path if backend else affine_directory, config)


@pytest.mark.parametrize(
    ("backend", "platform", "problem"),
    [
        ("jax_export", "tensorrt_plan", "unknown platform 'tensorrt_plan'"),
        ("", "tensorrt_plan", "unknown platform 'tensorrt_plan'"),
        ("identity", "jax_export", "backend 'identity' and platform 'jax_export', expected one"),
        ("identity", "onnxruntime_onnx", "expected one kind of model"),
    ],
)
def test_a_backend_hides_no_platform(
    affine_directory: Path, load: Load, backend: str, platform: str, problem: str
) -> None:
    with pytest.raises(InvalidModel, match=problem):
        load(affine_directory, ModelConfig(backend=backend, platform=platform))


@pytest.mark.parametrize(
    ("backend", "platform"),
    [("onnxruntime", ""), ("", "onnxruntime_onnx"), ("onnxruntime", "onnxruntime_onnx")],
)
def test_what_an_import_was_made_of_is_no_other_kind(
    affine_directory: Path, backend: str, platform: str
) -> None:
    config = ModelConfig(backend=backend, platform=platform)

    assert loaders.predict_size(affine_directory) == loaders.predict_size(affine_directory, config)


@pytest.mark.parametrize(
    "name", ["model.json", "model.jaxexp", "model.stablehlo", "params.safetensors"]
)
def test_missing_file_is_named(
    affine_directory: Path, tmp_path: Path, load: Load, name: str
) -> None:
    broken = shutil.copytree(affine_directory, tmp_path / "1")
    (broken / name).unlink()

    with pytest.raises(
        InvalidModel, match=f"^{re.escape(name)} is missing($|: the directory '1' holds )"
    ):
        load(broken)
    with pytest.raises(
        InvalidModel, match=f"^{re.escape(name)} is missing($|: the directory '1' holds )"
    ):
        loaders.predict_size(broken)


def test_missing_directory_is_a_missing_manifest(tmp_path: Path, load: Load) -> None:
    text = r"^model\.json is missing: there is no directory 'nowhere', looked for model\.json"
    with pytest.raises(InvalidModel, match=text):
        load(tmp_path / "nowhere")


def test_stages_are_told_as_they_come(affine_directory: Path) -> None:
    """At most six rows give the buckets 1, 2, 3, 4 and 6."""
    stages: list[Stage] = []
    context = LoadContext("m", "1", ModelConfig(), on_stage=stages.append)
    loaders.load(affine_directory, context).close()

    steps = range(1, 6)

    assert [
        Stage("reading"),
        Stage("proving"),
        *[Stage("compiling", step, 5) for step in steps],
        *[Stage("warming", step, 5) for step in steps],
    ] == stages


@pytest.mark.parametrize("stage", ["reading", "proving", "compiling 1 of 5", "warming 4 of 5"])
def test_cancelled_load_ends_before_the_next_step(affine_directory: Path, stage: str) -> None:
    stages: list[str] = []

    def check_cancelled() -> None:
        if stages and stages[-1] == stage:
            raise LoadCancelled("m")

    context = LoadContext(
        "m",
        "1",
        ModelConfig(),
        on_stage=lambda stage: stages.append(str(stage)),
        check_cancelled=check_cancelled,
    )

    with pytest.raises(LoadCancelled):
        loaders.load(affine_directory, context)
    assert stage == stages[-1]


def test_size_is_predicted_without_jax(affine_directory: Path) -> None:
    """The port opens, and memory is reserved, before JAX is imported, which takes seconds."""
    code = f"""
import sys
from pathlib import Path
from xlaserve.runtime.loaders import predict_size
(size,) = predict_size(Path({str(affine_directory)!r})).values()
print(size, "jax" in sys.modules)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()

    assert "False" == found[1]
    loaders.begin_estimating()
    (estimated,) = loaders.predict_size(affine_directory).values()
    assert manifest.read(affine_directory).parameters_bytes < int(found[0]) < estimated


def test_predicted_size_is_near_the_measured_one(
    affine_directory: Path, affine_model: LoadedModel
) -> None:
    measured = affine_model.info.memory.per_device

    assert measured == pytest.approx(loaders.predict_size(affine_directory), rel=0.1)


_SHARD = {"placement": "shard", "partition": '{"w": [null, "model"]}'}


@pytest.mark.parametrize(
    ("parameters", "used"),
    [({}, [0]), ({"devices": "2,1"}, [1, 2]), ({"devices": "all"}, [0, 1, 2, 3])],
)
def test_size_is_that_of_a_copy_on_each_device(
    affine_directory: Path, parameters: dict[str, str], used: list[int]
) -> None:
    (size,) = loaders.predict_size(affine_directory).values()
    config = ModelConfig(parameters=parameters)

    assert {f"cpu:{index}": size for index in used} == loaders.predict_size(
        affine_directory, config, Devices("cpu", 4)
    )


def test_a_part_of_what_is_split_is_on_each_device(affine_directory: Path) -> None:
    """A partition rule splits `w`, FP32[4,300]; other parameters are whole on each device."""
    (whole,) = loaders.predict_size(affine_directory, devices=Devices("cuda", 1)).values()
    config = ModelConfig(parameters={"devices": "all", **_SHARD})

    assert dict.fromkeys(("cuda:0", "cuda:1"), whole - 2400) == loaders.predict_size(
        affine_directory, config, Devices("cuda", 2)
    )


def test_one_of_several_processes_predicts_its_part_of_the_parameters(
    affine_directory: Path,
) -> None:
    """Everything else, programs and buffers, is needed by each process."""
    (whole,) = loaders.predict_size(affine_directory).values()
    (part,) = loaders.predict_size(affine_directory, processes=4).values()

    assert manifest.read(affine_directory).parameters_bytes * 3 // 4 == whole - part


def test_a_model_for_the_cpu_beside_gpus_is_booked_there(affine_directory: Path) -> None:
    kind = inference.ModelInstanceGroupKind(inference.ModelInstanceGroupKind.KIND_CPU)
    group = inference.ModelInstanceGroup(kind=kind)
    config = config_of(inference.ModelConfig(instance_group=[group]))

    assert ["cpu:0"] == list(loaders.predict_size(affine_directory, config, Devices("cuda", 2)))


def test_a_device_that_is_not_there_is_refused_before_a_load(affine_directory: Path) -> None:
    config = ModelConfig(parameters={"devices": "0,2"})

    with pytest.raises(InvalidModel, match="device 2 does not exist: this server has 2 of cpu"):
        loaders.predict_size(affine_directory, config, Devices("cpu", 2))


# --- sizes reported by a device's compiler -------------------------------------------------------

RECORDED = TargetSizes(6000, 500, 70)


@pytest.fixture(scope="module")
def recorded_directory(affine_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the affine model with its recorded memory on an H100."""
    path = shutil.copytree(affine_directory, tmp_path_factory.mktemp("recorded") / "1")
    manifest.write(path, dataclasses.replace(manifest.read(path), sizes={"h100": RECORDED}))
    return path


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ModelConfig(), {"cuda:0": 6000 + 2 * 500 + 70}),
        (ModelConfig(max_batch_size=6), {"cuda:0": 7070}),
        (ModelConfig(parameters={"devices": "1"}), {"cuda:1": 7070}),
        (ModelConfig(parameters={"devices": "all"}), {"cuda:0": 7070, "cuda:1": 7070}),
    ],
)
def test_what_the_compiler_said_of_a_kind_of_device_is_predicted_on_it(
    recorded_directory: Path, config: ModelConfig, expected: dict[str, int]
) -> None:
    """A replica may have two executions in flight."""
    devices = Devices("cuda", 2, H100)

    assert expected == loaders.predict_size(recorded_directory, config, devices)


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(max_batch_size=4),
        ModelConfig(is_unbatched=True),
        ModelConfig(parameters={"batch_sizes": "6"}),
        ModelConfig(dynamic_batching=DynamicBatching(preferred_batch_size=(5,))),
        ModelConfig(parameters={"devices": "all", **_SHARD}),
    ],
)
def test_what_was_said_of_other_programs_is_not_predicted(
    recorded_directory: Path, affine_directory: Path, config: ModelConfig
) -> None:
    devices = Devices("cuda", 2, H100)
    found, estimated = (
        loaders.predict_size(path, config, devices)
        for path in (recorded_directory, affine_directory)
    )

    assert 10_000 < min(estimated.values())
    assert all(size >= estimated[device] for device, size in found.items())


@pytest.mark.parametrize(
    "devices", [Devices("cuda", 1, "NVIDIA L4"), Devices("cuda", 1), Devices("cpu", 1, "cpu")]
)
def test_what_was_said_of_another_device_is_not_predicted(
    recorded_directory: Path, devices: Devices
) -> None:
    (size,) = loaders.predict_size(recorded_directory, ModelConfig(), devices).values()

    assert size > 10_000
