"""Make `examples/models` and `examples/data`: train, export, load, and check the loaded models.

    python tools/make_example_models.py [--exported-at 2026-01-31] [--into DIRECTORY]

It requires the oldest JAX that pyproject.toml allows, since newer versions read artifacts of older
ones, but not the reverse. The same machine, JAX and date produce the same bytes.
"""

import argparse
import importlib
import re
import sys
import tomllib
from datetime import UTC, date, datetime, time
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from xlaserve.authoring.export import Exportable, load_exportable
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.devices import jax_runtime
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MODELS = ("digits", "simple", "identity", "mlp")

DIGITS_CONFIG = """\
{
  "name": "digits",
  "parameters": {"image_scale": {"string_value": "0.00392156862745098"}}
}
"""
"""Configuration that scales images from 0..255 to 0..1, as in training."""

WANTED_ACCURACY = 0.97
IMAGE_SCALE = 20
"""Scale of the displayed image. With 16 the file had 256 bytes, the size of an FP32 [1,8,8]."""


def oldest_jax() -> str:
    """Return the lowest version of JAX that the project depends on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [re.match(r"jax>=([\d.]+)", line) for line in project["dependencies"]]
    return next(match[1] for match in found if match)


def make(directory: Path, exported_at: datetime) -> None:
    """Write the example models to `directory/models`, and an image of a seven to its `data`."""
    for name in MODELS:
        model = load_exportable(f"{EXAMPLES / name}.py:model")
        assert isinstance(model, Exportable)
        path = model.write(
            directory / "models" / name / "1", exported_at=exported_at, overwrite=True
        )
        size = sum(file.stat().st_size for file in path.iterdir())
        print(f"{name}: {size} bytes, exported by jax {jax.__version__}")
    (directory / "models" / "digits" / "config.json").write_text(DIGITS_CONFIG)
    jax_runtime.start("cpu")
    digits = loaders.load(
        directory / "models" / "digits" / "1", LoadContext("digits", "1", ModelConfig())
    )
    pixels, labels = held_out_digits()
    probabilities = recognise(digits, pixels)
    accuracy = float(np.mean(np.argmax(probabilities, axis=1) == labels))
    print(f"digits, as loaded: {accuracy:.2%} of {len(labels)} images held out")
    if accuracy < WANTED_ACCURACY:
        sys.exit(f"expected at least {WANTED_ACCURACY:.0%}")
    clearest_seven = np.argmax(np.where(labels == 7, probabilities[:, 7], 0))
    write_image(directory / "data" / "seven.png", pixels[clearest_seven])


def held_out_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images that the digits model was not trained on, and their labels."""
    sys.path.insert(0, str(EXAMPLES))
    _, held_out = importlib.import_module("digits").split()
    return held_out.pixels, held_out.digits


def recognise(digits: LoadedModel, pixels: np.ndarray) -> np.ndarray:
    """Return the loaded model's probability of each digit for each image."""
    batches = np.array_split(pixels, -(-len(pixels) // digits.info.max_batch_size))
    return np.concatenate(
        [np.asarray(digits.execute({"image": batch})["probabilities"]) for batch in batches]
    )


def write_image(path: Path, pixels: np.ndarray) -> None:
    """Write values from 0 to 1 as a greyscale image, enlarged so that a person can see it."""
    grey = Image.fromarray(np.round(pixels * 255).astype(np.uint8))
    path.parent.mkdir(parents=True, exist_ok=True)
    size = (grey.width * IMAGE_SCALE, grey.height * IMAGE_SCALE)
    grey.resize(size, Image.Resampling.NEAREST).save(path, optimize=True)
    print(f"{path.name}: {grey.width}x{grey.height} pixels, shown {IMAGE_SCALE} times larger")


def main() -> None:
    """Read the arguments and make the models."""
    parser = argparse.ArgumentParser(description="Make the example models.")
    parser.add_argument("--into", type=Path, default=EXAMPLES, metavar="DIRECTORY")
    parser.add_argument(
        "--exported-at",
        type=date.fromisoformat,
        default=datetime.now(UTC).date(),
        metavar="DATE",
        help="what the manifests say (default: today)",
    )
    parser.add_argument(
        "--any-jax", action="store_true", help="for trying it out: not only with the oldest JAX"
    )
    arguments = parser.parse_args()
    if jax.__version__ != oldest_jax() and not arguments.any_jax:
        sys.exit(f"jax {oldest_jax()} must write the example models, this is jax {jax.__version__}")
    make(arguments.into, datetime.combine(arguments.exported_at, time(), UTC))


if __name__ == "__main__":
    main()
