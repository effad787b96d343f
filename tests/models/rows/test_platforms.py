"""Verdicts on the rows for each platform, of which only one is here."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.rows import exported

from xlaserve.models import manifest
from xlaserve.models.export import Exportable
from xlaserve.models.lowering import PLATFORMS
from xlaserve.models.rows import prove_each

MATRICES = [((4, 4), "float32")]


def _definite(a: Any) -> Any:
    return a @ jnp.swapaxes(a, -1, -2) + 4 * jnp.eye(4)


METHODS: dict[str, Callable[[Any], Any]] = {
    "solve": lambda a: jnp.linalg.solve(_definite(a), a),
    "inv": jnp.linalg.inv,
    "det": jnp.linalg.det,
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "qr": lambda a: jnp.linalg.qr(a)[1],
    "eigh": lambda a: jnp.linalg.eigh(_definite(a))[0],
    "svd": lambda a: jnp.linalg.svd(a)[1],
    "pinv": jnp.linalg.pinv,
    "lstsq": jax.vmap(lambda a: jnp.linalg.lstsq(a, a[0])[0]),
    "lu": lambda a: jax.scipy.linalg.lu(a)[2],
    "cholesky": lambda a: jnp.linalg.cholesky(_definite(a)),
    "expm": jax.vmap(jax.scipy.linalg.expm),
    "polar": jax.vmap(lambda a: jax.scipy.linalg.polar(a)[0]),
    "tridiagonal": lambda a: jax.lax.linalg.tridiagonal_solve(
        a[:, 0], a[:, 1] + 4, a[:, 2], a[..., :1]
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_linear_algebra_is_proved_on_every_platform(name: str) -> None:
    """What CUDA and TPUs call for it is in the program that is exported for them here."""
    found = prove_each(exported(METHODS[name], MATRICES, platforms=PLATFORMS), 0, ["y"])

    assert dict.fromkeys(PLATFORMS, "proved") == {name: str(one) for name, one in found.items()}


def _differing(params: object, x: jax.Array) -> jax.Array:
    del params
    return jax.lax.platform_dependent(
        x, tpu=lambda v: v - v.mean(0, keepdims=True), default=lambda v: v * 2
    )


def test_a_platform_that_mixes_rows_does_not_decide_for_the_others(tmp_path: Path) -> None:
    notices: list[str] = []
    model = Exportable(_differing, None, {"x": ("FP32", [-1, 4])}, outputs=["y"])
    described = manifest.read(model.write(tmp_path / "m" / "1", on_notice=notices.append))

    assert 64 == described.max_batch_size
    assert described.verdict is not None
    assert "mixed" == described.verdict.independence
    assert described.verdict.reason.endswith(", on tpu")
    assert 1 == len(notices)
    assert notices[0].endswith("no request will be put together with another on tpu")
