"""What every test shares: two virtual CPU devices, strict promotion, and a running server."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import pytest
from hypothesis import HealthCheck, settings
from support.engines import ENGINE
from support.server import RunningServer, Serve

from xlaserve.app import Application
from xlaserve.settings import ModelControlMode, Settings

# Time is never asserted: machines are shared.
settings.register_profile(
    "shared machines", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machines")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="session")
def example_models() -> Path:
    """The repository of example models."""
    return EXAMPLES / "models"


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """Run a server on a repository for the length of a block; settings by keyword."""

    @asynccontextmanager
    async def run(repository: Path, **settings: Any) -> AsyncIterator[RunningServer]:
        defaults: dict[str, Any] = {
            "grpc_endpoint": "port:0",
            "http_endpoint": "none",
            "model_control_mode": ModelControlMode.EXPLICIT,
            "scratch_directory": tmp_path,
            "device": "cpu",
            "background_compile": False,
            "compilation_cache_directory": "none",
            "http2_engine": ENGINE,
        }
        application = Application(Settings.read({}, repository=repository, **defaults | settings))
        async with application.running() as addresses:
            await application.load()
            yield RunningServer(application, addresses.grpc, addresses.http)

    return run
