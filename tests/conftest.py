"""What every test shares: two virtual CPU devices, strict promotion, and a running server."""

import os
from functools import partial
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import pytest
from hypothesis import HealthCheck, settings
from support.server import Serve, serving

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

    return partial(serving, tmp_path)
