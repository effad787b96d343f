"""Compare a server's memory reservations with those of a device's compiler, without the device.

    python tools/accelerator_sizes.py --target h100 [--target l4] [--models DIRECTORY] [--scale 4]

It needs the wheels of the target. The examples, ONNX networks of the tests, larger architectures
and Llamas are exported to DIRECTORY, or to a temporary one, unless they exist. Results are stored
in docs/measurements/accelerators.json, and `accelerators_page.py` makes a table from them. The
table also lists the size that a server reports before the first load, without the compiler's figure
in the manifest.
"""

# jax is only partly typed.
# mypy: disallow-untyped-calls=False

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from accelerators_page import Row, keep, problems
from xlaserve.artifact import manifest
from xlaserve.authoring.export import Exportable
from xlaserve.offline.targets import environment, wheels
from xlaserve.offline.targets.environment import choices
from xlaserve.runtime.devices import target_kinds as kinds

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "models"
CODE_UNKNOWN = "the compiler omits code; the size of the serialized executable is used"
CONSTANTS_ONCE = "constants shared by several programs count once"
_TOLERANCE = 0.01


# --- Models ------------------------------------------------------------------------------------


def write_models(directory: Path, scale: int, names: Sequence[str] = ()) -> dict[str, Path]:
    """Export missing models; return the version directories by name."""
    found = {name: EXAMPLES / name / "1" for name in sorted(p.name for p in EXAMPLES.iterdir())}
    for name, write in (*_architectures(scale), *_networks(), *_llamas()):
        if names and name not in names:
            continue
        path = directory / name.replace(" ", "_").replace("/", "_") / "1"
        if not path.exists():
            print(f"exporting {name}", file=sys.stderr)
            write(path)
        found[name] = path
    return {name: path for name, path in found.items() if not names or name in names}


def _architectures(scale: int) -> Iterator[tuple[str, Callable[[Path], object]]]:
    from support.architectures import ARCHITECTURES

    def write(make: Callable[[int], Exportable], path: Path) -> None:
        make(scale).write(path, on_notice=lambda notice: None)

    for name, make in ARCHITECTURES.items():
        yield name if scale == 1 else f"{name} 1/{scale}", partial(write, make)


def _networks() -> Iterator[tuple[str, Callable[[Path], object]]]:
    from support import onnx_networks as networks

    made: tuple[tuple[str, Callable[[], Any], Mapping[str, Sequence[int]]], ...] = (
        ("ONNX ResNet-50", partial(networks.resnet50, 32), {}),
        ("ONNX MobileNetV2", networks.mobilenet_v2, {}),
        ("ONNX EfficientNet", networks.efficientnet, {}),
        ("ONNX MobileNetV3", partial(networks.efficientnet, hard=True), {}),
        ("ONNX YOLO", networks.yolo, {}),
        ("ONNX encoder", partial(networks.distilbert, networks.Encoder()), {"sequence": (16,)}),
    )
    for name, make, dimensions in made:
        yield name, partial(_import, make, dimensions)


def _import(make: Callable[[], Any], dimensions: Mapping[str, Sequence[int]], path: Path) -> None:
    import onnx

    from xlaserve.importers.onnx.importing import Options, import_model

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        onnx.save(make(), file)
        options = Options(int(path.name), dimensions=dimensions, check=False)
        import_model(file, path.parent, options)


def _llamas() -> Iterator[tuple[str, Callable[[Path], object]]]:
    for size in ("125m", "1b"):
        yield f"Llama {size}", partial(_import_llama, size)


def _import_llama(size: str, path: Path) -> None:
    from generation_checkpoint import write_checkpoint
    from xlaserve.importers.huggingface.importing import import_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "llama"
        write_checkpoint(checkpoint, size)
        import_checkpoint(checkpoint, path.parent, int(path.name))


# --- Compile process ---------------------------------------------------------------------------


def measure(target: kinds.Target, name: str, path: Path, present: Sequence[Any]) -> Row:
    """Compile a model for its smallest and its largest batch, and compare the figures."""
    from xlaserve.generation import loading as generators
    from xlaserve.model_config.config import ModelConfig
    from xlaserve.offline.targets.ahead import Ahead
    from xlaserve.runtime.devices.workspace import shared
    from xlaserve.runtime.programs.footprint import Footprint

    if generators.is_there(path):
        return _of_generator(target, name, path, present)
    most = manifest.read(path).max_batch_size
    sizes = "1" if most < 2 else f"1,{most}"
    is_batched = manifest.read(path).is_open
    config = ModelConfig(parameters={"batch_sizes": sizes} if is_batched else {})
    model = Ahead.read(path, config, target.platform, present)
    (copy,) = model.copies
    executions, held, code, unsaid, constants = [0], 0, 0, 0, [0]
    parameters = _parameters_bytes(copy.leaves)
    for place in model.work():
        lowered, said, footprint = model.lowered(place), None, None
        # As a plan does: the device may use either set of options, so take the larger footprint.
        for options in choices(target.platform, lowered.as_text().encode()):
            executable = lowered.compile(compiler_options=dict(options) or None)
            found = Footprint.of(executable, accelerated=copy.site.is_accelerator)
            footprint = found if footprint is None else footprint.or_larger(found)
            if footprint.scratch_bytes == found.scratch_bytes:
                said = executable.memory_analysis()
        assert footprint is not None
        assert said is not None
        model.note(place, footprint)
        whole = _held_by(said)
        # The workspace that a library needs during a call counts once, for the device.
        theirs = shared(footprint.workspace_bytes, said.temp_size_in_bytes)
        unused = copy.leaves_bytes + footprint.padding_bytes - footprint.parameters_bytes
        executions.append(whole - theirs + unused - parameters)
        constants.append(max(0, said.total_allocation_bytes - whole))
        code += max(0, said.generated_code_size_in_bytes)
        unsaid += footprint.code_bytes - max(0, said.generated_code_size_in_bytes)
        held = max(held, whole - theirs + unused)
    compiled = held + (copy.in_flight - 1) * max(executions) + sum(constants) + code
    (reserved,) = model.memory.per_device.values()
    once = sum(constants) - model.memory.constants_bytes
    told = _told(target, path, config)
    row = Row(name, target.name, sizes, parameters, max(executions), compiled, reserved, told)
    return Row(**{**asdict(row), "why": _why(row, unsaid, once)})


def _held_by(said: Any) -> int:
    """Return the bytes of arguments, results and temporaries in a memory analysis."""
    whole = said.argument_size_in_bytes + said.output_size_in_bytes + said.temp_size_in_bytes
    return int(whole - said.alias_size_in_bytes)


def _of_generator(target: kinds.Target, name: str, path: Path, present: Sequence[Any]) -> Row:
    """Compile every program of a generator; its size depends on its slots instead of batches.

    A server reads the workspace of library calls from the compiled text; the compiler counts it
    among the temporaries.
    """
    from xlaserve.generation import loading as generators
    from xlaserve.model_config.config import ModelConfig
    from xlaserve.offline.targets.child import Child
    from xlaserve.offline.targets.jobs import Job

    config = ModelConfig()
    model = generators.Ahead.of(path, config, target.platform, present)
    kept = temporaries = code = 0
    for wanted in model.lowering.programs():
        said: Any = wanted.lowered().compile().memory_analysis()
        whole = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes
        kept, temporaries = max(kept, whole), max(temporaries, said.temp_size_in_bytes)
        code += max(0, said.generated_code_size_in_bytes)
    done = Child().compiled(Job(name, str(path), target.name))
    if done.reserved is None:
        raise RuntimeError(f"{name}: {done.problem}")
    (reserved,) = done.reserved.per_device.values()
    compiled, held = kept + temporaries + code, done.reserved.executables_bytes
    row = Row(
        *(name, target.name, f"{model.slots} slots", done.parameters_bytes, temporaries),
        *(compiled, reserved, _told(target, path, config)),
    )
    return Row(**{**asdict(row), "why": _why(row, held - code, 0)})


def _told(target: kinds.Target, path: Path, config: Any) -> int:
    """Return the size that a server with one such device reports before the first load."""
    from xlaserve.runtime import loaders
    from xlaserve.runtime.devices.placement import Devices

    (told,) = loaders.predict_size(path, config, Devices(target.platform, 1)).values()
    return told


def _parameters_bytes(leaves: Sequence[Any]) -> int:
    """Return the argument bytes of a program that takes the parameters and does nothing."""
    import jax
    import jax.numpy as jnp

    if not leaves:
        return 0
    probe = jax.jit(lambda parameters: jnp.zeros(()), keep_unused=True)
    said: Any = probe.lower(list(leaves)).compile().memory_analysis()
    return int(said.argument_size_in_bytes)


def _why(row: Row, unsaid: int, shared: int) -> str:
    """Return the known reason for a difference, or an empty string."""
    if abs(row.difference) <= _TOLERANCE:
        return ""
    reasons = [text for size, text in ((unsaid, CODE_UNKNOWN), (shared, CONSTANTS_ONCE)) if size]
    left = row.reserved - unsaid + shared - row.compiled
    return "; ".join(reasons) if abs(left) <= _TOLERANCE * row.compiled else ""


def child() -> int:
    """Read jobs from stdin, `[target, name, path]` per line, and print a row for each."""
    from xlaserve.offline.targets.topology import open_devices
    from xlaserve.runtime import loaders
    from xlaserve.runtime.devices import jax_runtime

    jax_runtime.start("cpu")
    loaders.begin_estimating()
    for line in sys.stdin:
        target, name, path = json.loads(line)
        row = kinds.named(target)
        found = measure(row, name, Path(path), open_devices(row))
        print(json.dumps(asdict(found)), flush=True)
    return 0


# --- Main process ------------------------------------------------------------------------------


def compared(target: kinds.Target, models: Mapping[str, Path]) -> Iterator[Row]:
    """Yield a row for each model; raises RuntimeError if one cannot be compiled."""
    jobs = "".join(
        json.dumps([target.name, name, str(path)]) + "\n" for name, path in models.items()
    )
    variables = {**environment.of(target), "PYTHONPATH": ":".join(filter(None, sys.path))}
    with tempfile.TemporaryFile("w+") as given:
        given.write(jobs)
        given.seek(0)
        with subprocess.Popen(
            [sys.executable, __file__, "--child"],
            env=variables,
            stdin=given,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    yield Row(**json.loads(line))
    if process.returncode:
        raise RuntimeError(f"the process that compiles ended with {process.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--target", action="append", default=[], help="a kind of device")
    parser.add_argument("--models", type=Path, help="where exported models are, or are put")
    parser.add_argument("--scale", type=int, default=1, help="how much smaller architectures are")
    parser.add_argument("--only", action="append", default=[], help="the name of a model")
    asked = parser.parse_args()
    if asked.child:
        return child()
    targets = [kinds.named(name) for name in asked.target]
    for target in targets:
        wheels.check(target)
    sys.path.insert(0, str(ROOT / "tests"))
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(asked.models or Path(folder), asked.scale, asked.only)
        found = []
        for target in targets:
            for row in compared(target, models):
                print(f"{row.model} on {row.target}: {row.difference:+.2%} {row.why}", flush=True)
                keep([row])
                found.append(row)
    return int(any(True for _ in problems(found)))


if __name__ == "__main__":
    sys.exit(main())
