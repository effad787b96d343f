"""A cache that one process filled, and a server in another that compiles nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xlaserve

START = Path(__file__).with_name("warmed_start.py")
MODELS = 20


def run(*command: str | Path, **variables: str) -> str:
    """Run Python to its end; return stdout."""
    ran = subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    return ran.stdout


def start(repository: Path, cache: Path | str, **variables: str) -> dict[str, Any]:
    lines = run(START, repository, cache, **variables).splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty models, each with a computation of its own."""
    return export(tmp_path_factory.mktemp("models"), MODELS)


def export(root: Path, count: int) -> Path:
    """Write so many models."""
    random = np.random.default_rng(0)
    for number in range(count):
        columns = 300 + number
        xlaserve.export_model(
            lambda p, x: {"y": np.float32(2) * (x @ p["w"]).sum(axis=1, keepdims=True)},
            {"w": random.standard_normal((4, columns)).astype(np.float32)},
            {"x": ("FP32", [-1, 4])},
            root / f"m{number:02}" / "1",
            max_batch_size=1,
        )
    return root


@pytest.mark.slow
def test_server_on_a_warmed_cache_compiles_nothing_and_answers_alike(
    repository: Path, tmp_path: Path
) -> None:
    """Counted by JAX, with a server without a cache as the control."""
    cache = tmp_path / "cache"
    command: list[str | Path] = [
        "-m",
        "xlaserve",
        "warm",
        repository,
        "--target",
        "cpu",
        "--cache",
        cache,
    ]
    warmed = [json.loads(line) for line in run(*command, "--json").splitlines()]
    control = start(repository, "none")
    found = start(repository, cache)

    assert [f"m{number:02}" for number in range(MODELS)] == [row["model"] for row in warmed]
    assert {(1, 0, "")} == {(row["compiled"], row["cached"], row["problem"]) for row in warmed}
    assert (0, 0, MODELS) == tuple(
        found[name] for name in ("compilations", "compiled_programs", "cached_programs")
    )
    assert MODELS <= control["compilations"]
    assert (MODELS, 0) == (control["compiled_programs"], control["cached_programs"])
    assert control["answers"] == found["answers"]
    assert MODELS == len(found["answers"])


FEW = 2
OTHERS: dict[str, tuple[str, dict[str, str]]] = {
    "jax": ("import jax\njax.__version__ = '0.0.1'\n", {}),
    "threads": ("", {"NPROC": "3"}),
}
"""What another environment has, as code that runs at its start, and as variables."""


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_servers_of_two_environments_in_turn_find_all_of_theirs(tmp_path: Path, other: str) -> None:
    """A roll-back compiles nothing: the newer server has not replaced what the older one wrote."""
    code, variables = OTHERS[other]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(code)
    export(tmp_path / "few", FEW)
    path = os.pathsep.join([str(tmp_path / "other"), *filter(None, sys.path)])
    environments = [{}, {"PYTHONPATH": path, **variables}] * 2
    found = [start(tmp_path / "few", tmp_path / "cache", **one) for one in environments]

    assert [(FEW, 0)] * 2 + [(0, FEW)] * 2 == [
        (one["compiled_programs"], one["cached_programs"]) for one in found
    ]
    assert 1 == len({json.dumps(one["answers"]) for one in found})
