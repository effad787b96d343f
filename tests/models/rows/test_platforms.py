"""Row verdicts per platform, of which only one is available here."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from structlog.testing import capture_logs
from support.rows import exported

from xlaserve.artifact import manifest
from xlaserve.authoring import lowering
from xlaserve.authoring.export import Exportable
from xlaserve.authoring.lowering import PLATFORMS
from xlaserve.errors import InvalidModel
from xlaserve.row_proofs import prove_each
from xlaserve.row_proofs.verdict import Independence, Verdict

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
    """The exported program contains the library calls for CUDA and TPUs."""
    found = prove_each(exported(METHODS[name], MATRICES, platforms=PLATFORMS), 0, ["y"])

    assert dict.fromkeys(PLATFORMS, "proved") == {name: str(one) for name, one in found.items()}


def _mixing(platform: str, **more: Any) -> Exportable:
    """Return a model that mixes rows on one platform only."""

    def function(params: object, x: jax.Array) -> Any:
        del params
        mixes = {platform: lambda v: v - v.mean(0, keepdims=True)}
        return jax.lax.platform_dependent(x, default=lambda v: v * 2, **mixes)

    return Exportable(function, None, {"x": ("FP32", [-1, 4])}, outputs=["y"], **more)


def test_a_platform_that_mixes_rows_does_not_decide_for_the_others(tmp_path: Path) -> None:
    notices: list[str] = []
    model = _mixing("tpu")
    described = manifest.read(model.write(tmp_path / "m" / "1", on_notice=notices.append))

    assert 64 == described.max_batch_size
    assert described.verdict is not None
    assert "unknown" == described.verdict.independence
    assert described.verdict.reason.endswith(", on tpu")
    assert 1 == len(notices)
    assert "; requests will not be batched on tpu; reduce over another axis" in notices[0]


def test_a_difference_here_refutes_no_proof_of_another_platform(tmp_path: Path) -> None:
    """The trial ran this platform's computation, for which nothing was proved."""
    notices: list[str] = []
    with capture_logs() as logs:
        directory = _mixing("cpu").write(tmp_path / "m" / "1", on_notice=notices.append)

    described = manifest.read(directory)
    assert [] == [line for line in logs if line["log_level"] == "error"]
    assert 64 == described.max_batch_size
    assert described.verdict is not None
    assert "mixed" == described.verdict.independence
    assert described.verdict.operation == "stablehlo.reduce"
    assert "output 'y' of a row changes" in described.verdict.reason
    assert described.verdict.reason.endswith(", on cpu")
    assert "; requests will not be batched on cpu; reduce over another" in notices[0]


def test_rows_that_are_declared_are_refused_where_one_platform_mixes_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"declared independent, but they are not: mixed.* on c"):
        _mixing("cpu", batch_independent=True).write(tmp_path / "m" / "1")


@pytest.mark.parametrize(
    ("elsewhere", "independence"), [("proved", "unknown"), ("unknown", "mixed")]
)
def test_a_proof_that_a_trial_contradicts_is_refused_on_every_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, elsewhere: str, independence: str
) -> None:
    verdicts = {"cpu": Verdict(Independence.PROVED), "tpu": Verdict(Independence(elsewhere))}
    monkeypatch.setattr(lowering, "prove_each", lambda *_, **__: verdicts)
    with capture_logs() as logs:
        directory = _mixing("cpu").write(tmp_path / "m" / "1")

    described = manifest.read(directory)
    loud = [line["event"] for line in logs if line["log_level"] == "error"]
    assert ["row proof contradicted"] == loud
    assert 0 == described.max_batch_size
    assert described.verdict is not None
    assert independence == described.verdict.independence
