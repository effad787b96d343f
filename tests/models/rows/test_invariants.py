"""Invariants of every rule's results, and attributes that no rule may ignore."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.honest_rows import HONEST
from support.rows import exported, findings_of, verdict_of

from xlaserve.row_proofs import Independence, program, proof, ranges, refining
from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.domain import (
    ROWS,
    Along,
    Dimensions,
    Factor,
    RowNumber,
    Value,
    joined_dimension,
    uniform,
    varying,
)
from xlaserve.row_proofs.findings import Finding, NoRule
from xlaserve.row_proofs.program import Operation, Pair
from xlaserve.row_proofs.rules import places
from xlaserve.row_proofs.rules.tracing import Place
from xlaserve.row_proofs.sizes import BATCH, Size, fitted, static
from xlaserve.row_proofs.table import RULES
from xlaserve.row_proofs.walk import Rule, Walker

F4 = [((4,), "float32")]
FOUR = (Factor(static(4), Along.ANY),)
THREE = (Factor(static(3), Along.ANY),)
SIZED = Finding(True, "stablehlo.constant", "uses the batch size as a value")


def planted(
    monkeypatch: pytest.MonkeyPatch, results: Callable[[Sequence[Value]], Sequence[Value]]
) -> None:
    """Register a rule for `tanh` that gives the same answer for every input."""
    rule = Rule(lambda operation, operands, walker: results(operands))
    rules = MappingProxyType({**RULES, "stablehlo.tanh": rule})
    monkeypatch.setattr("xlaserve.row_proofs.proof.RULES", rules)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (Value(((ROWS,), THREE)), "has different dimension sizes than its rule"),
        (Value(((ROWS, *FOUR), FOUR)), "has different dimension sizes than its rule"),
        (Value(((ROWS,),)), "has a different rank than its rule"),
        (
            Value(((Factor(Size(2, 0), Along.ROW),), FOUR)),
            "has different dimension sizes than its rule",
        ),
        (Value(((ROWS,), FOUR), fact=RowNumber(1)), "has a different element shape than its rule"),
        (
            Value(((ROWS,), FOUR), fact=Constant(np.arange(3))),
            "has a different element shape than its rule",
        ),
        (Value(varying((BATCH, static(4)))), "depends on rows, contrary to its rule"),
    ],
)
def test_what_a_rule_says_must_fit_what_is_computed(
    monkeypatch: pytest.MonkeyPatch, result: Value, reason: str
) -> None:
    planted(monkeypatch, lambda operands: [result])

    verdict = verdict_of(jnp.tanh, F4)

    assert (verdict.independence, verdict.operation) == (Independence.UNKNOWN, "stablehlo.tanh")
    assert reason in verdict.reason


def test_a_rule_of_too_few_results_makes_nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda operands: [])

    assert "has a different number of results than its rule" in verdict_of(jnp.tanh, F4).reason


def test_a_rule_may_not_forget_the_size_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda operands: [Value(operands[0].dimensions)])

    verdict = verdict_of(lambda x: jnp.tanh(x * x.shape[0]), F4)

    assert "depends on the batch size, contrary to its rule" in verdict.reason


def _stumbles(*_: object) -> Sequence[Value]:
    raise IndexError("of a form that was not thought of")


def test_a_rule_that_stumbles_costs_the_proof_of_one_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted(monkeypatch, _stumbles)

    stumbled, other = findings_of(exported(lambda x: [jnp.tanh(x), x + 1.0], F4))

    assert stumbled is not None
    assert stumbled[:3] == (
        False,
        "stablehlo.tanh",
        "has a form unknown to its rule (IndexError)",
    )
    assert other is None


def test_what_stumbles_where_more_could_be_known_costs_no_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = {**RULES, "stablehlo.add": replace(RULES["stablehlo.add"], settle=_stumbles)}
    monkeypatch.setattr("xlaserve.row_proofs.proof.RULES", MappingProxyType(rules))

    assert findings_of(exported(lambda x: x + 1.0, F4)) == [None]


def test_truth_that_is_reduced_along_nothing_is_read() -> None:
    def model(x: jax.Array) -> jax.Array:
        is_any = lax.reduce(x[:, 0] > 0, np.bool_(False), lax.bitwise_or, ())
        return x[jnp.arange(x.shape[0]), is_any.astype(int)]

    assert findings_of(exported(model, F4)) == [None]


def test_a_rule_that_says_what_is_so_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, list)

    assert str(verdict_of(jnp.tanh, F4)) == "proved"


NOTHING = Value((), Finding(False, "stablehlo.tanh", "is not followed"))


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (Value(((ROWS,), FOUR)), "proved"),
        (Value(((ROWS,), THREE)), "unknown"),
        (Value(((ROWS,),)), "unknown"),
        (Value(((ROWS,), (ROWS,))), "unknown"),
        (Value(((ROWS,), FOUR), fact=RowNumber(1)), "unknown"),
    ],
)
def test_what_is_settled_must_fit_what_is_computed(
    monkeypatch: pytest.MonkeyPatch, result: Value, verdict: str
) -> None:
    rule = Rule(lambda *_: [NOTHING], settle=lambda *_: [result])
    rules = MappingProxyType({**RULES, "stablehlo.tanh": rule})
    monkeypatch.setattr("xlaserve.row_proofs.proof.RULES", rules)

    assert verdict == verdict_of(jnp.tanh, F4).independence


SIX = (Factor(static(6), Along.UNIFORM),)


@pytest.mark.parametrize(
    ("offset", "rows", "verdict"),
    [
        (uniform([BATCH]), ((ROWS,),), "proved"),
        (uniform([static(6)]), ((ROWS,),), "unknown"),
        (uniform([BATCH]), ((ROWS, *SIX),), "unknown"),
        (uniform([BATCH]), ((ROWS,), ()), "unknown"),
        (uniform([BATCH]), uniform([BATCH]), "unknown"),
    ],
)
def test_what_is_traced_back_must_fit_what_is_computed(
    monkeypatch: pytest.MonkeyPatch, offset: Dimensions, rows: Dimensions, verdict: str
) -> None:
    """The replaced rule describes the product, by which elements are then looked up."""
    place = Place(Value(offset), ranges.of_integer(0), 6, rows)
    traced = MappingProxyType({**places._RULES, "stablehlo.multiply": lambda trace: place})
    monkeypatch.setattr(places, "_RULES", traced)

    def model(x: jax.Array) -> jax.Array:
        return x.reshape(-1)[jnp.arange(x.shape[0]) * 6]

    assert verdict == verdict_of(model, [((6,), "float32")]).independence


# --- attributes --------------------------------------------------------------------------------


def operations_of(region: program.Region) -> Iterator[Operation]:
    for operation in region.operations:
        yield operation
        for inner in operation.regions:
            yield from operations_of(inner)


def test_an_attribute_that_differs_and_is_not_read_as_a_size_is_no_rule() -> None:
    """Every attribute of one operation of each kind, in networks that are all proved."""
    rows = proof.PAIRS[0]
    seen: set[tuple[str, str]] = set()
    for name in ("cnn", "fourier", "softmax", "cholesky", "sorted", "top_k", "embedding"):
        if name not in HONEST:
            continue
        artifact = exported(*HONEST[name])
        with jax.enable_x64(True), refining.parsing():
            refinery = refining.Refinery(artifact, {}, "b")
            module = refining.parse(refinery.refined(refinery.open_module(rows[0], "cpu")))
            read = program.read(module, module, rows)
            for operation in operations_of(read.body):
                for attribute, said in operation.attributes.items():
                    if (operation.name, attribute) in seen or operation.name not in RULES:
                        continue
                    seen.add((operation.name, attribute))
                    if attribute not in RULES[operation.name].grows:
                        assert not is_known(operation, attribute, Pair(said, said))

    assert len(seen) >= 20


def is_known(operation: Operation, attribute: str, said: Pair) -> bool:
    """Tell whether a rule accepts an operation whose attribute depends on the batch size."""
    changed = replace(operation, attributes={**operation.attributes, attribute: said})
    walker = Walker(RULES, float("inf"))
    operands = tuple(range(1000, 1000 + len(operation.operand_types)))
    values = [Value(varying(kind.shape)) for kind in operation.operand_types]
    region = program.Region(operands, (replace(changed, operands=operands),), operation.results)
    return all(value.blocked is None for value in walker.region(region, values))


# --- sizes -------------------------------------------------------------------------------------


def test_a_size_that_grows_has_no_fixed_value() -> None:
    assert static(4).fixed == 4
    with pytest.raises(NoRule):
        _ = Size(1, 4).fixed


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((ROWS, *FOUR), (ROWS, *THREE)),
        ((ROWS,), (Factor(Size(2, 0), Along.UNIFORM),)),
        (FOUR, (Factor(static(3), Along.UNIFORM),)),
        ((Factor(static(2), Along.ANY), *THREE), (Factor(static(8), Along.UNIFORM),)),
    ],
)
def test_dimensions_of_different_sizes_are_never_joined(
    left: tuple[Factor, ...], right: tuple[Factor, ...]
) -> None:
    for one, other in ((left, right), (right, left)):
        with pytest.raises(NoRule):
            joined_dimension(one, other)


def test_a_size_is_fitted_by_what_it_is_at_both() -> None:
    assert fitted(41, 45, (37, 41)) == Size(1, 4)


# --- blocks of rows ----------------------------------------------------------------------------

INPUTS = [((5, 6), "float32"), ((3, 6), "float32"), ((2, 6), "float32")]


def flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, 6)


def cut_as_another(x: jax.Array, y: jax.Array, _: jax.Array) -> jax.Array:
    b = x.shape[0]
    _, c, _ = jnp.split(jnp.concatenate([flat(y), flat(x)]), [3 * b, 6 * b])
    return c.reshape(b, 3, 6)


def lengths_of_the_same_sum(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
    """Blocks of 3, 5 and 2 rows have the same total length as one block of 10."""
    b = x.shape[0]
    z = jnp.concatenate([flat(w), flat(w[:, :1]), flat(y)])
    return z.reshape(3, b, 2, 6)[1]


def one_too_far(x: jax.Array, y: jax.Array, _: jax.Array) -> jax.Array:
    b = x.shape[0]
    return jnp.concatenate([flat(y), flat(x)])[3 * b + 1 :][: 5 * b - 1][: 3 * b].reshape(b, 3, 6)


def by_stride(x: jax.Array, y: jax.Array, _: jax.Array) -> jax.Array:
    b = x.shape[0]
    return jnp.concatenate([flat(y), flat(x)])[::8].reshape(b, 6)


def behind_padding(x: jax.Array, *_: jax.Array) -> jax.Array:
    return jnp.pad(x, ((1, 0), (0, 0), (0, 0)))[:-1]


@pytest.mark.parametrize(
    "model", [cut_as_another, lengths_of_the_same_sum, one_too_far, by_stride, behind_padding]
)
def test_blocks_of_rows_that_are_cut_elsewhere_are_not_proved(
    model: Callable[..., jax.Array],
) -> None:
    assert verdict_of(model, INPUTS).independence != Independence.PROVED


def cut_back(x: jax.Array, y: jax.Array, w: jax.Array) -> list[jax.Array]:
    """One encoder run processes all parts of all rows."""
    b = x.shape[0]
    z = jnp.tanh(jnp.concatenate([flat(y), flat(x), flat(w)])) * 2.0 + jnp.arange(6.0)
    one, two, three = jnp.split(z, [3 * b, 8 * b])
    return [two.reshape(b, 5, 6), one.reshape(b, 3, 6), three.reshape(b, 12)]


def cut_back_in_steps(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
    b = x.shape[0]
    z = jnp.concatenate([jnp.concatenate([flat(y), flat(x)]), flat(w)]).T.reshape(2, 3, -1)
    both = z[..., 3 * b :]
    return both[..., : 5 * b].transpose(2, 0, 1).reshape(b, 5, 2, 3)


def cut_from_padding(x: jax.Array, *_: jax.Array) -> jax.Array:
    b = x.shape[0]
    return jnp.pad(x, ((2, 1), (0, 0), (1, 0)))[2 : b + 2]


def cut_from_behind_a_row(x: jax.Array, *_: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.zeros((1, 5, 6)), x])[1:]


def whole_blocks(x: jax.Array, *_: jax.Array) -> jax.Array:
    """Slice two of three blocks of all rows, and then one of these two."""
    b = x.shape[0]
    z = jnp.concatenate([x, x * 2, x * 3])
    return z[b:][:b] + z[: 2 * b][b:]


@pytest.mark.parametrize(
    "model", [cut_back, cut_back_in_steps, cut_from_padding, cut_from_behind_a_row, whole_blocks]
)
def test_blocks_of_rows_that_are_cut_where_they_were_joined_are_proved(
    model: Callable[..., object],
) -> None:
    assert str(verdict_of(model, INPUTS)) == "proved"
