"""A hostile or unusual artifact gets the verdict unknown, whatever it contains."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False, warn-return-any=False

import dataclasses
import itertools
import time

import jax
import jax.numpy as jnp
import pytest
from support.rows import exported, verdict_of

from xlaserve.row_proofs import Independence, loops_follow_inputs, program, prove, walk
from xlaserve.row_proofs.rules import control
from xlaserve.row_proofs.table import RULES

F4 = [((4,), "float32")]


def test_bytes_that_are_no_module_are_unknown() -> None:
    artifact = exported(lambda x: x, F4)
    broken = dataclasses.replace(artifact, mlir_module_serialized=b"ML\xefR no module")

    verdict = prove(broken, 0, ["y"])

    assert verdict.independence == Independence.UNKNOWN
    assert verdict.loops_follow_rows
    assert verdict.loops_follow_inputs
    assert loops_follow_inputs(broken)


def test_a_model_without_a_batch_is_unknown() -> None:
    function = jax.jit(lambda x, y: [x, y])
    artifact = jax.export.export(function, platforms=["cpu"])(
        jax.ShapeDtypeStruct((2, 4), "float32"), jax.ShapeDtypeStruct((3, 4), "float32")
    )

    verdict = prove(artifact, 0, ["x", "y"])

    assert str(verdict) == "unknown: its inputs do not share a batch dimension"


@pytest.mark.parametrize(
    ("where", "name", "limit", "reason"),
    [
        (program, "MAX_OPERATIONS", 20, "more than 20 operations"),
        (program, "MAX_DEPTH", 1, "nested too deeply"),
        (program, "MAX_VALUES_OF_ONE", 2, "too many values"),
        (walk, "MAX_STEPS", 20, "more than 20 steps"),
        (control, "MAX_ROUNDS", 1, "is a loop that could not be analysed completely"),
    ],
)
def test_the_walk_is_bounded(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, limit: int, reason: str
) -> None:
    def model(x: jax.Array) -> jax.Array:
        def inner(_: int, v: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(v[0] + v[1]), v[0] * jnp.argsort(v[0]).astype(jnp.float32)

        def outer(_: int, v: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return jax.lax.fori_loop(0, 3, inner, v)

        return jax.lax.fori_loop(0, 3, outer, (x, jnp.ones_like(x)))[0]

    before = verdict_of(model, F4)
    monkeypatch.setattr(where, name, limit)
    after = verdict_of(model, F4)

    assert str(before) == "proved"
    assert after.independence == Independence.UNKNOWN
    assert reason in after.reason


def test_an_operation_without_a_rule_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "xlaserve.row_proofs.proof.RULES",
        {name: rule for name, rule in RULES.items() if name != "stablehlo.tanh"},
    )

    verdict = verdict_of(jnp.tanh, F4)

    assert (verdict.independence, verdict.operation) == (Independence.UNKNOWN, "stablehlo.tanh")
    assert verdict.reason == "has no rule"


def test_a_function_that_is_not_known_is_unknown() -> None:
    def model(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("foreign", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    artifact = jax.export.export(
        jax.jit(lambda x: [model(x)]),
        platforms=["cpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("foreign")],
    )(jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 4), "float32"))

    verdict = prove(artifact, 0, ["y"])

    assert (verdict.independence, verdict.operation) == (
        Independence.UNKNOWN,
        "stablehlo.custom_call",
    )
    assert verdict.reason == "calls 'foreign', which has no rule"


def test_a_loop_to_an_input_follows_inputs_without_a_batch() -> None:
    shape = jax.ShapeDtypeStruct((1,), "int32")
    to_input, to_constant = (
        jax.export.export(jax.jit(fn), platforms=["cpu"])(shape)
        for fn in (
            lambda n: [jax.lax.fori_loop(0, n[0], lambda i, v: v + i, n)],
            lambda n: [jax.lax.fori_loop(0, 9, lambda i, v: v + i, n)],
        )
    )

    assert loops_follow_inputs(to_input)
    assert not loops_follow_inputs(to_constant)


def test_a_busy_machine_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock advances it by a minute: only CPU time is limited."""
    times = itertools.count(step=60.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))

    def many(x: jax.Array) -> jax.Array:
        for number in range(300):
            x = jnp.sin(x) + number
        return x

    assert "proved" == str(verdict_of(many, [((4,), "float32")]))
