"""Compilation for absent GPUs and TPUs: `tox run -e cuda`, `tox run -e tpu`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.architectures import ARCHITECTURES

import accelerator_sizes
import accelerators_page
from xlaserve.authoring.export import export_model
from xlaserve.offline.targets import environment
from xlaserve.offline.targets.compiling import Compilers
from xlaserve.offline.targets.jobs import Job
from xlaserve.runtime.devices.target_kinds import TARGETS

OPENED = Path(__file__).parent / "opened.py"


def test_every_kind_opens_with_every_count_and_shards_a_program(platform: Any) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, str(OPENED), platform.name],
        env={**environment.of(platform.target), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not ran.returncode, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])

    rows = [row for row in TARGETS.values() if row.platform == platform.name]
    assert {row.name: list(row.counts) for row in rows} == {
        name: list(map(int, opened["arguments"])) for name, opened in found.items()
    }
    for row in rows:
        opened = found[row.name]
        assert opened["kind"].startswith(row.kind)
        # A matrix of 2 MiB in equal parts, plus 16 KiB on every device.
        assert {str(count): (2 << 20) // count + (16 << 10) for count in row.counts} == opened[
            "arguments"
        ]


def test_copies_and_shards_lie_on_all_devices(
    platform: Any, compilers: Compilers, tmp_path: Path
) -> None:
    """A shard holds a part of the parameters, and a replica all of them."""
    params = {"w": np.zeros((1024, 1024), np.float32)}
    path = tmp_path / "wide" / "1"
    export_model(
        lambda p, x: x @ p["w"], params, {"x": ("FP32", [-1, 1024])}, path, outputs=["y"],
        max_batch_size=2,
    )  # fmt: skip
    partition = {"placement": "shard", "partition": '{"w": [null, "model"]}'}
    copies, shards = compilers.compile(
        Job("wide", str(path), platform.target.name, 4, parameters={"devices": "all", **said})
        for said in ({}, partition)
    )

    assert copies.reserved is not None
    assert shards.reserved is not None
    names = {f"{platform.name}:{index}" for index in range(4)}
    assert names == set(copies.reserved.per_device) == set(shards.reserved.per_device)
    assert 4 * params["w"].nbytes == copies.reserved.parameters_bytes
    assert params["w"].nbytes == shards.reserved.parameters_bytes


@pytest.mark.parametrize("name", ["mobilenet", "gpt_step"])
def test_what_is_reserved_is_what_the_compiler_says(
    platform: Any, tmp_path: Path, name: str
) -> None:
    """Within one percent, or for a reason listed in docs/measurements/accelerators.md."""
    path = ARCHITECTURES[name](4).write(tmp_path / name / "1")
    (row,) = accelerator_sizes.compared(platform.target, {name: path})

    assert [] == list(accelerators_page.problems([row]))
    assert abs(row.difference) < 0.01


def test_an_artifact_for_the_cpu_alone_is_told_so(
    platform: Any, compilers: Compilers, tmp_path: Path
) -> None:
    path = tmp_path / "host" / "1"
    export_model(lambda p, x: x, None, {"x": ("FP32", [4])}, path, outputs=["y"], platforms=["cpu"])
    (found,) = compilers.compile([Job("host", str(path), platform.target.name)])

    assert found.problem is not None
    assert "was exported for cpu" in found.problem.reason


@pytest.mark.tpu
def test_what_a_tpu_has_no_way_for_names_the_operation(tmp_path: Path) -> None:
    """A TPU has no product of 64-bit integers."""
    if not _has("v5e"):
        pytest.skip("libtpu is not installed")

    def product(params: None, x: jax.Array) -> jax.Array:
        return x @ x

    path = tmp_path / "wide" / "1"
    export_model(product, None, {"x": ("INT64", [8, 8])}, path, outputs=["y"])
    with Compilers(most=1) as compilers:
        (found,) = compilers.compile([Job("wide", str(path), "v5e")])

    assert found.problem is not None
    assert "dot" == found.problem.operation


@pytest.mark.tpu
def test_what_a_tpu_has_no_memory_for_is_said_by_its_compiler(tmp_path: Path) -> None:
    if not _has("v5e"):
        pytest.skip("libtpu is not installed")

    def greedy(params: None, x: jax.Array) -> jax.Array:
        return jnp.sort(x[:, :, None] * x[:, None, :], axis=1).sum(axis=2)

    path = tmp_path / "greedy" / "1"
    inputs: dict[str, tuple[str, list[int | str]]] = {"x": ("FP32", [-1, "n"])}
    # With a small compiled shape, which the run back on the CPU uses.
    export_model(greedy, None, inputs, path, outputs=["y"], compiled_shapes={"n": [8]})
    job = Job("greedy", str(path), "v5e", parameters={"compiled_shapes": "100000"})
    with Compilers(most=1) as compilers:
        (found,) = compilers.compile([job])

    assert found.problem is not None
    assert "Ran out of memory on HBM" in found.problem.reason


def _has(target: str) -> bool:
    from xlaserve.errors import DeviceUnavailable
    from xlaserve.offline.targets import wheels

    try:
        wheels.check(TARGETS[target])
    except DeviceUnavailable:
        return False
    return True
