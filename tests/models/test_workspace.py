"""The workspace of libraries counts once for a device, and plans book the larger of two kernels."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import xlaserve
from xlaserve.generation.in_place import Memory
from xlaserve.offline.device_plan import DevicePlanner
from xlaserve.offline.targets import environment
from xlaserve.offline.targets.child import Child
from xlaserve.offline.targets.jobs import Job
from xlaserve.residence.host import capacity_bytes
from xlaserve.residence.repository.repositories import open_repositories
from xlaserve.runtime.devices import target_kinds as kinds
from xlaserve.runtime.devices import workspace
from xlaserve.runtime.programs.compilation import XlaOptions
from xlaserve.runtime.programs.footprint import Footprint
from xlaserve.runtime.programs.held_memory import memory_of
from xlaserve.settings import Settings

MIB = 1 << 20
CALL = (
    '  %call.6 = (f32[8,48]{1,0}, s8[SIZE]{0}) custom-call(%a, %b), custom_call_target="__TARGET"'
)


class _Compiled:
    """Takes a hundred bytes of temporaries, and what a library asks for."""

    argument_size_in_bytes = output_size_in_bytes = alias_size_in_bytes = 0
    generated_code_size_in_bytes = 1

    def __init__(self, size: int, target: str = "cublas$lt$matmul") -> None:
        self.temp_size_in_bytes = self.total_allocation_bytes = size + 100
        self._text = CALL.replace("SIZE", str(size)).replace("TARGET", target)

    def memory_analysis(self) -> Any:
        return self

    def as_text(self) -> str:
        return self._text


@pytest.mark.parametrize(
    ("size", "target", "expected"),
    [
        (4 * MIB, "cublas$gemm", 100),
        (32 * MIB, "cublas$lt$matmul", 100),
        (16 * MIB, "cudnn$convForward", 100),
        # What is beyond is the model's.
        (100 * MIB, "cudnn$convForward", 68 * MIB + 100),
        # Nobody but these libraries asks for it: on a TPU it would be the model's own.
        (4 * MIB, "kernel", 4 * MIB + 100),
    ],
)
def test_an_execution_is_booked_without_it(size: int, target: str, expected: int) -> None:
    made = _Compiled(size, target)

    assert expected == Footprint.of(made, accelerated=True, kept_bytes=0).scratch_bytes
    assert size + 100 == Footprint.of(made, kept_bytes=0).scratch_bytes
    assert expected == Memory.of(made).booked


def test_many_models_share_it() -> None:
    """Two hundred models on Hopper, of which each would have reserved 64 MiB for cuBLAS."""
    footprint = Footprint.of(_Compiled(32 * MIB), accelerated=True, kept_bytes=0)
    site = SimpleNamespace(device_names=("cuda:0",), is_accelerator=True, platform="cuda")
    copy: Any = SimpleNamespace(
        leaves_bytes=0, in_flight=2, programs=[SimpleNamespace(footprint=footprint)], site=site
    )

    held = [memory_of([copy], 0).per_device["cuda:0"] for _ in range(200)]

    assert 200 * (2 * 100 + 1) == sum(held)
    # Two executions at a time, each with all that it takes.
    assert 2 * footprint.temporaries_bytes <= 2 * 100 + workspace.device_bytes("cuda")


@pytest.mark.parametrize(
    ("platform", "limit", "expected"),
    [
        ("cuda", 1 << 30, (1 << 30) - 64 * MIB),
        ("tpu", 1 << 30, 1 << 30),
        ("cuda", 1 * MIB, 0),
    ],
)
def test_a_device_keeps_it_from_models(platform: str, limit: int, expected: int) -> None:
    settings = Settings.read({}, repository=Path("/m"), memory_overhead_bytes=0)
    more = Settings.read({}, repository=Path("/m"), memory_overhead_bytes=100 * MIB)
    told = Settings.read({}, repository=Path("/m"), capacity_bytes=5 * MIB)

    assert expected == capacity_bytes(settings, limit, 1, platform)
    # It is a part of the overhead.
    assert max(0, limit - 100 * MIB) == capacity_bytes(more, limit, 1, platform)
    assert 5 * MIB == capacity_bytes(told, limit, 1, platform)


class _Compilers:
    def compile(self, jobs: list[Job], on_done: object) -> list[Any]:
        return []


def test_a_plan_keeps_it_as_a_server_does(tmp_path: Path) -> None:
    settings = Settings.read({}, repository=tmp_path, memory_overhead_bytes=0)
    target = kinds.named("h100")

    planner = DevicePlanner(settings, open_repositories(settings), _Compilers())  # type: ignore[arg-type]
    made = planner.plan(target)

    limit = int(settings.gpu_memory_fraction * target.memory_bytes)
    assert capacity_bytes(settings, limit, 1, "cuda") == made.capacity_bytes == limit - 64 * MIB


def test_either_of_two_kernels_has_memory() -> None:
    cublas = Footprint(temporaries_bytes=32 * MIB + 7, workspace_bytes=32 * MIB, code_bytes=9)
    triton = Footprint(temporaries_bytes=4 * MIB, code_bytes=3, constants_bytes=5)

    for found in (cublas.or_larger(triton), triton.or_larger(cublas)):
        assert (4 * MIB, 9, 5) == (found.scratch_bytes, found.code_bytes, found.constants_bytes)
        assert 4 * MIB - 7 == found.spared_bytes


def test_products_are_compiled_with_each_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the process that plans; here it is this one, and the CPU has the choice of a GPU."""
    paths = {
        name: xlaserve.export_model(
            function,
            {"w": np.ones((4, 3), np.float32)},
            {"x": ("FP32", [-1, 4])},
            tmp_path / name / "1",
            max_batch_size=1,
        )
        for name, function in {
            "product": lambda p, x: {"y": x @ p["w"]},
            "sum": lambda p, x: {"y": x + p["w"][None, :, 0]},
        }.items()
    }
    given: list[Mapping[str, Any]] = []
    real = XlaOptions.compiled

    def noted(self: XlaOptions, lowered: Any, site: Any, more: Mapping[str, Any]) -> Any:
        given.append(more)
        return real(self, lowered, site, more)

    monkeypatch.setattr(XlaOptions, "compiled", noted)
    monkeypatch.setattr(environment, "_CHOICES", {"cpu": environment._CHOICES["cuda"]})
    child = Child()
    for name, path in paths.items():
        given.clear()
        found = child.compiled(Job(name, str(path), "cpu"))

        assert found.problem is None
        expected = [{}, {"xla_gpu_enable_triton_gemm": True}]
        assert expected[: 2 if name == "product" else 1] == given
