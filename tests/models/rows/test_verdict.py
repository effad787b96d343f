from xlaserve.row_proofs.verdict import Independence, Verdict, worst


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


def test_the_worst_of_several_platforms_says_which_it_is() -> None:
    mixed = Verdict(Independence.MIXED, "y", "stablehlo.reduce", "reduces over the rows")
    proved = Verdict(Independence.PROVED, loops_follow_rows=True)

    found = worst({"cpu": proved, "tpu": mixed})

    assert "mixed: stablehlo.reduce reduces over the rows, on tpu, seen in output 'y'" == str(found)
    assert found.loops_follow_rows
    assert mixed == worst({"cpu": mixed, "tpu": mixed})
