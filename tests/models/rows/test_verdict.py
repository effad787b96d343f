from xlaserve.models.rows.verdict import Independence, Verdict


def test_a_verdict_names_operation_reason_place_and_output() -> None:
    verdict = Verdict(
        Independence.MIXED, "y", "stablehlo.reduce", "reduces over the rows", "model.py:12"
    )

    assert str(verdict) == (
        "mixed: stablehlo.reduce reduces over the rows (model.py:12), seen in output 'y'"
    )


def test_a_proof_is_one_word() -> None:
    assert str(Verdict(Independence.PROVED)) == "proved"


def test_a_reason_without_an_operation_stands_alone() -> None:
    assert str(Verdict(Independence.UNKNOWN, reason="too deep")) == "unknown: too deep"
