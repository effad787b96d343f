"""The models of a run, made on the CPUs while the device is busy with other steps."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from device.place import EXAMPLES, ROOT, Place

_WAIT_SECONDS = 200


def _platforms(place: Place) -> list[str]:
    return list(dict.fromkeys(("cpu", place.device)))


def of_architecture(name: str, *, half: bool = False) -> Callable[[Place, Path], None]:
    """Return a maker of a network with random parameters, in FP32 or computed in BF16."""

    def write(place: Place, path: Path) -> None:
        import jax
        import ml_dtypes
        from support.architectures import ARCHITECTURES

        from xlaserve.authoring.export import Exportable

        made = ARCHITECTURES[name](4 if place.quick else 1)
        params: Any = made.params
        function: Any = made.fn
        if half:
            narrow = ml_dtypes.bfloat16
            params = jax.tree.map(
                lambda one: one.astype(narrow) if one.dtype == np.float32 else one, params
            )

            def computed_in_half(p: Any, x: Any) -> Any:
                x = x.astype(narrow) if x.dtype == np.float32 else x
                found: Any = made.fn(p, x)
                return {key: value.astype(np.float32) for key, value in found.items()}

            function = computed_in_half

        most = place.batches[-1]
        exportable = Exportable(
            function, params, made.inputs, max_batch_size=most, platforms=_platforms(place)
        )
        exportable.write(path / "1", on_notice=print)
        configure(path, batch_sizes=",".join(map(str, place.batches)))

    return write


def of_onnx(name: str, **dimensions: Any) -> Callable[[Place, Path], None]:
    """Return a maker that builds an ONNX network of the tests and imports it."""

    def write(place: Place, path: Path) -> None:
        import onnx
        from support import onnx_networks, onnx_real_networks

        from xlaserve.importers.onnx.importing import Options, import_model

        makes: dict[str, Callable[[], Any]] = {
            "resnet18": lambda: onnx_real_networks.resnet18(64 if place.quick else 224),
            "mobilenet": onnx_networks.mobilenet_v2,
            "yolo": onnx_networks.yolo,
            "encoder": lambda: onnx_networks.distilbert(onnx_networks.Encoder()),
        }
        file = place.folder / f"{name}.onnx"
        onnx.save(makes[name](), file)
        import_model(file, path, Options(1, dimensions=dimensions, check=False))
        configure(path, batch_sizes="1,8")

    return write


def of_pt2(name: str) -> Callable[[Place, Path], None]:
    """Return a maker that copies a torch.export file; the server imports it on load."""

    def write(place: Place, path: Path) -> None:
        (path / "1").mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "data" / "pt2" / f"{name}.pt2", path / "1" / "model.pt2")

    return write


def llama(place: Place, path: Path, weights: str = "") -> None:
    """Make a Llama with the shape of 3.2 1B, except for its tied head, with random BF16 weights."""
    import ml_dtypes
    from safetensors.numpy import save_file

    hidden, layers, heads, keys, wide, vocab = (
        (64, 2, 4, 2, 128, 512) if place.quick else (2048, 16, 32, 8, 8192, 128_256)
    )
    random, narrow = np.random.default_rng(0), ml_dtypes.bfloat16
    pool = (random.standard_normal(1 << 22, np.float32) * np.float32(0.02)).astype(narrow)

    def matrix(*shape: int) -> Any:
        start = int(random.integers(1 << 21))
        return np.resize(pool[start:], int(np.prod(shape))).reshape(shape)

    kv = keys * hidden // heads
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    tensors: dict[str, Any] = {"model.norm.weight": np.ones(hidden, narrow)}
    tensors |= {name: matrix(vocab, hidden) for name in tables}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = np.ones(hidden, narrow)
        for name, out in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = matrix(out, hidden)
        for name, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):  # fmt: skip # noqa: E501
            tensors[f"{at}mlp.{name}_proj.weight"] = matrix(*shape)
    source = place.folder / f"checkpoint{weights}"
    source.mkdir(exist_ok=True)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    described: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab,
        "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": keys, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(described))
    more = ["--weights", weights] if weights else []
    command = [sys.executable, "-m", "xlaserve", "import", str(source), str(path), *more]
    subprocess.run(command, check=True, cwd=place.folder)
    slots, sizes = (4, "1,4") if place.quick else (64, "1,8,32,64")
    configure(path, slots=str(slots), step_sizes=sizes, length="512", windows="512", chunk="128",
              prefix_cache="false")  # fmt: skip


def sequence(place: Place, path: Path) -> None:
    """Make the example model with sequences."""
    sys.path.insert(0, str(ROOT / "examples"))
    import recurrent  # type: ignore[import-not-found, unused-ignore]

    recurrent.model().write(path / "1")
    (path / "config.pbtxt").write_text(recurrent.CONFIG)


def tiny(place: Place, path: Path) -> None:
    """Make the generator of the tests, whose answers are known."""
    from support import tiny_language

    tiny_language.export(path / "1", platforms=_platforms(place))
    configure(path, slots="4")


def embedding(place: Place, path: Path) -> None:
    """Make the encoder of the tests, whose vectors are known."""
    from support import tiny_embedding

    from xlaserve.authoring.export import export_model

    tiny_embedding.export(path)
    ids = ("INT32", [-1, "s"])
    export_model(
        tiny_embedding.embed,
        {"table": tiny_embedding.table()},
        {"input_ids": ids, "attention_mask": ids},
        path / "1",
        max_batch_size=4,
        compiled_shapes={"s": list(tiny_embedding.LENGTHS)},
        platforms=_platforms(place),
        overwrite=True,
    )
    tiny_embedding.tokenizer().save(str(path / "1" / "tokenizer.json"))


MAKERS: dict[str, Callable[[Place, Path], None]] = {
    "llama": llama,
    "llama_int8": lambda place, path: llama(place, path, "int8"),
    "llama_int4": lambda place, path: llama(place, path, "int4"),
    "bert_bf16": of_architecture("bert", half=True),
    "resnet50_bf16": of_architecture("resnet50", half=True),
    "bert": of_architecture("bert"),
    "resnet18": of_onnx("resnet18"),
    "encoder": of_onnx("encoder", sequence=(16,)),
    "yolo": of_onnx("yolo"),
    "mobilenet": of_onnx("mobilenet"),
    "linear_algebra": of_architecture("linear_algebra"),
    "pt2": of_pt2("mlp"),
    "sequence": sequence,
    "tiny": tiny,
    "embedding": embedding,
}
LARGE = frozenset({"resnet18", "yolo", "mobilenet"})
"""Models that are left out of quick runs."""


def configure(path: Path, **parameters: str) -> None:
    """Write the configuration of a model."""
    path.mkdir(parents=True, exist_ok=True)
    values = {key: {"string_value": value} for key, value in parameters.items()}
    (path / "config.json").write_text(json.dumps({"parameters": values}))


def make(place: Place, name: str) -> None:
    """Make a model unless it exists, and leave a marker file for success or failure."""
    done = place.folder / f"done.{name}"
    if done.exists():
        return
    place.models.mkdir(parents=True, exist_ok=True)
    try:
        with place.findings("prepare").part(name):
            MAKERS[name](place, place.models / name)
            done.touch()
    finally:
        if not done.exists():
            (place.folder / f"failed.{name}").touch()


def made(place: Place, name: str) -> Path:
    """Return the directory of a model: wait for it, or make it here in a quick run."""
    if place.quick:
        make_alone(place, name)
    until = time.monotonic() + _WAIT_SECONDS
    while not (place.folder / f"done.{name}").exists():
        if (place.folder / f"failed.{name}").exists() or time.monotonic() > until:
            raise RuntimeError(f"model {name} was not made: see the step 'prepare'")
        time.sleep(0.2)
    return place.models / name


def make_alone(place: Place, name: str) -> None:
    """Make a model in a separate process with JAX on the CPU only."""
    if not (place.folder / f"done.{name}").exists():
        alone = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}
        command = [sys.executable, str(Path(__file__).parent), f"make:{name}"]
        subprocess.run(command, env=place.environment | alone, check=False)


def repository(place: Place, name: str, *models: str) -> Path:
    """Return a repository with models of this run or of the examples.

    Files are hard-linked or copied, because a server follows no symbolic link out of its
    repository.
    """
    folder = place.folder / name
    for model in models:
        source = EXAMPLES / model if (EXAMPLES / model).exists() else made(place, model)
        with suppress(FileExistsError):
            shutil.copytree(source, folder / model, copy_function=_link)
    return folder


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
