"""Fixtures for every test: two virtual CPU devices, strict promotion, and a running server."""

import gc
import os
import sys
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import pytest
import structlog
from hypothesis import HealthCheck, settings
from support import costs, hanging, unsteady, written_programs
from support.made_once import made_once
from support.server import Serve, serving

# No test asserts durations: machines are shared.
settings.register_profile(
    "shared machines", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machines")

pytest_exception_interact = hanging.pytest_exception_interact
pytest_runtest_protocol = hanging.pytest_runtest_protocol


def pytest_addoption(parser: pytest.Parser) -> None:
    for each in (unsteady, costs):
        each.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    for each in (unsteady, costs):
        each.pytest_configure(config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Check all programs that fixtures and tests write."""
    written_programs.watch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the costly tests before pytest selects by marks."""
    costs.mark(items)


EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


# Never called without xdist.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Run one process more than there are cores: tests spend a fifth of their time waiting.

    `logical` means a process per core, and the environment variable has precedence, as in xdist.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return cores + (1 if config.option.numprocesses == "auto" else 0)


_ON_A_GPU = "mark.gpu"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` alone, import only modules that have a test for a GPU.

    A machine with a GPU, borrowed for minutes, lacks packages that the others need.
    """
    if config.option.markexpr.strip() != "gpu":
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any(_ON_A_GPU in file.read_text() for file in files) else True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude collected tests from garbage collection: there are thousands, and they stay.

    Every unload runs a collection, which would traverse them.
    """
    gc.disable()
    try:
        result = yield
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
    return result


@pytest.fixture(autouse=True)
def new_log() -> Iterator[None]:
    """Give each test structlog's initial configuration.

    Commands that run within a test or fixture configure logging: after one that shows only errors,
    later tests in the process would see no warning.
    """
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def example_models() -> Path:
    """The repository of example models."""
    return EXAMPLES / "models"


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A shared compilation cache for servers of a test run, for tests that ask for compilations."""
    return str(made_once(tmp_path_factory, "programs", lambda made: made.chmod(0o700)))


@pytest.fixture
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Serve:
    """Run a server on a repository for the length of a block; settings by keyword.

    Servers of a test run share a compilation cache, which saves a third of their time, unless a
    test asks for the compilations, or for another directory.
    """
    counted = "compilations" in request.fixturenames
    kept = "none" if counted else request.getfixturevalue("programs")
    return partial(serving, tmp_path, compilation_cache_directory=kept)
