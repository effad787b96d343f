"""The claims of each rule about each operand, in said_of_rules.txt, checked against XLA."""

from pathlib import Path

import pytest
from support.row_claims import Sample, table

from xlaserve.row_proofs.rules import elementwise
from xlaserve.row_proofs.table import RULES

SAID = table(Path(__file__).with_name("said_of_rules.txt"))
ELSEWHERE = {
    "stablehlo.constant",
    "stablehlo.custom_call",
    "stablehlo.if",
    "stablehlo.while",
    "stablehlo.batch_norm_training",
    "stablehlo.batch_norm_grad",
}
"""Rules that have their own tests."""

samples = pytest.mark.parametrize(
    "sample", SAID, ids=[f"{n} {one.partition(' ')[0]}" for n, one in enumerate(SAID)]
)


def test_every_rule_has_a_sample() -> None:
    names = {Sample.read(one).name for one in SAID}

    assert RULES.keys() - elementwise.NAMES - ELSEWHERE == names - elementwise.NAMES


@samples
def test_a_rule_says_of_each_operand_what_is_written(sample: str) -> None:
    assert Sample.read(sample).said() == SAID[sample]


@samples
def test_what_a_rule_says_is_so_alone_and_in_a_batch(sample: str) -> None:
    assert list(Sample.read(sample).contradictions()) == []
