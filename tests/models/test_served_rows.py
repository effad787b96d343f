"""How a model's rows are served, depending on proof, declaration, configuration and trial."""

import pytest

from xlaserve.artifact.signature import Signature, agreed
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import parse_json
from xlaserve.row_proofs.neighbours import Difference
from xlaserve.row_proofs.verdict import Independence, Verdict
from xlaserve.runtime.programs.served_rows import ServedRows, served_rows
from xlaserve.tensors import DATATYPES, TensorSpec

X = TensorSpec("x", DATATYPES["FP32"], (-1, 4))

PROVED = Verdict(Independence.PROVED)
MIXED = Verdict(Independence.MIXED, "y", "stablehlo.reduce", "reduces over the rows")
UNKNOWN = Verdict(Independence.UNKNOWN, "y", "stablehlo.rng", "has no rule")

MIXED_NOTICE = (
    "rows are mixed: stablehlo.reduce reduces over the rows, in output 'y'; reduce over another "
    "axis than the first: x.max(axis=-1) instead of x.max()"
)

TRUE, FALSE = ({"batch_independent": text} for text in ("true", "false"))
DIFFERENCE = Difference("y", 4, "before rows of NaN", 2.5)


def decide(
    verdict: Verdict,
    config: ModelConfig,
    exported: int = 64,
    difference: Difference | None = None,
) -> ServedRows:
    signature = agreed(Signature((X,), (X,), exported), config)
    return served_rows(signature, config, verdict, lambda: difference)


@pytest.mark.parametrize("verdict", [PROVED, MIXED, UNKNOWN], ids=str)
@pytest.mark.parametrize(
    ("config", "exported", "proved", "mixed", "unknown"),
    [
        (ModelConfig(), 64, (64, False), (0, True), (0, True)),
        (ModelConfig(), 0, (0, True), (0, True), (0, True)),
        (ModelConfig(max_batch_size=8), 64, (8, False), (8, True), (8, True)),
        (ModelConfig(max_batch_size=8), 0, (8, False), (8, True), (8, True)),
        (ModelConfig(is_unbatched=True), 64, (0, True), (0, True), (0, True)),
        (ModelConfig(parameters=FALSE), 64, (64, False), (64, False), (64, False)),
        (ModelConfig(parameters=FALSE), 0, (0, True), (0, True), (0, True)),
        (ModelConfig(parameters=TRUE), 32, (32, False), None, (32, False)),
        (ModelConfig(parameters=TRUE), 0, (64, False), None, (64, False)),
        (ModelConfig(parameters=TRUE, max_batch_size=8), 0, (8, False), None, (8, False)),
        (ModelConfig(parameters=TRUE, is_unbatched=True), 64, (0, True), None, (0, True)),
    ],
)
def test_rows_are_shared_where_that_is_proved_or_declared(
    verdict: Verdict,
    config: ModelConfig,
    exported: int,
    proved: tuple[int, bool] | None,
    mixed: tuple[int, bool] | None,
    unknown: tuple[int, bool] | None,
) -> None:
    """Expected: `max_batch_size` and whether each batch size has its own program, or a refusal."""
    expected = {"proved": proved, "mixed": mixed, "unknown": unknown}[verdict.independence]
    if expected is None:
        with pytest.raises(InvalidModel, match="declared independent, but they are not: mixed"):
            decide(verdict, config, exported)
        return
    found = decide(verdict, config, exported)

    assert expected == (found.max_batch_size, found.is_exact)


def test_declaration_does_not_stand_against_a_trial() -> None:
    with pytest.raises(InvalidModel) as caught:
        decide(UNKNOWN, ModelConfig(parameters=TRUE), difference=DIFFERENCE)

    assert (
        "parameter 'batch_independent': rows are declared independent, but they are not: "
        "output 'y' of a row changes by up to 2.5 in a batch of 4, before rows of NaN"
    ) == str(caught.value)


def test_nothing_is_tried_where_nobody_declares_anything() -> None:
    """A trial compiles and executes the model, and its result would change nothing."""

    def never() -> Difference | None:
        raise AssertionError

    for verdict, parameters in ((PROVED, TRUE), (UNKNOWN, {}), (MIXED, {}), (UNKNOWN, FALSE)):
        config = ModelConfig(parameters=parameters)
        served_rows(Signature((X,), (X,), 64), config, verdict, never)


@pytest.mark.parametrize(
    ("verdict", "text", "notice"),
    [
        (PROVED, '{"dynamic_batching": {}}', ""),
        (MIXED, '{"max_batch_size": 0}', ""),
        (PROVED, '{"max_batch_size": 0}', ""),
        (MIXED, "{}", MIXED_NOTICE),
        (
            UNKNOWN,
            '{"dynamic_batching": {}}',
            "rows are unknown: stablehlo.rng has no rule, in output 'y'; write the function for "
            "one row and apply jax.vmap; parameter 'batch_independent' \"true\" declares them "
            "independent; dynamic_batching has no effect",
        ),
    ],
)
def test_log_is_told_why_requests_are_not_put_together(
    verdict: Verdict, text: str, notice: str
) -> None:
    assert notice == decide(verdict, parse_json(text)).notice


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (ModelConfig(), True),
        (ModelConfig(max_batch_size=8), False),
        (ModelConfig(parameters=FALSE), False),
    ],
)
def test_log_is_told_why_rows_that_are_proved_are_not_put_together(
    config: ModelConfig, says: bool
) -> None:
    """Older manifests have 0 if rows were not proved for some other platform."""
    expected = (
        "rows are proved independent, but max_batch_size is 0: set it in the configuration to "
        "batch requests"
    )

    assert (expected if says else "") == decide(PROVED, config, exported=0).notice
