"""Tests whose external programs are missing."""

import pytest
from support import tools

MISSING = "no-such-program"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"CI": "true"}, True),
        ({"CI": "1"}, True),
        ({"CI": "false"}, False),
        ({"CI": ""}, False),
        ({"REQUIRE_TOOLS": "1"}, True),
        ({"REQUIRE_TOOLS": "0", "CI": "true"}, False),
        ({"REQUIRE_TOOLS": "", "CI": "true"}, True),
    ],
)
def test_tools_are_required_in_ci_and_where_it_is_said(
    environment: dict[str, str], expected: bool
) -> None:
    assert expected is tools.required(environment)


def test_a_missing_program_skips_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUIRE_TOOLS", "0")

    with pytest.raises(pytest.skip.Exception, match=f"{MISSING} or other is not installed"):
        tools.program(MISSING, "other")


def test_a_missing_program_fails_where_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REQUIRE_TOOLS", "1")

    with pytest.raises(pytest.fail.Exception, match=f"{MISSING} is not installed"):
        tools.program(MISSING)


def test_the_first_program_that_is_installed_is_taken() -> None:
    assert tools.program(MISSING, "sh", "cat").endswith("/sh")
