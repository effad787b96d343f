"""`xlaserve access check`: permissions according to a rules file, without a server."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from xlaserve.cli import application

RULES = """
[[caller]]
name = "alice"
allow = ["infer"]
models = ["digits", "mlp-*"]
token = "{digest}"

[[caller]]
name = "operator"
allow = ["manage", "metrics"]
token = "{other}"
listener = ["grpc_endpoint"]

[[caller]]
name = "everybody"
allow = ["health"]
anyone = true
"""


@pytest.fixture(name="files")
def _files(tmp_path: Path) -> tuple[Path, Path]:
    """Return a rules file, and a file with the token of alice."""
    made = [CliRunner().invoke(application(), ["token"]).output.splitlines() for _ in range(2)]
    (token, first), (_, second) = made
    digests = [line.partition('"')[2].rstrip('"') for line in (first, second)]
    rules, shown = tmp_path / "rules.toml", tmp_path / "token"
    rules.write_text(RULES.format(digest=digests[0], other=digests[1]))
    shown.write_text(f"{token}\n")
    return rules, shown


def check(*arguments: object) -> Result:
    return CliRunner().invoke(
        application(), ["access", "check", *map(str, arguments)], env={"COLUMNS": "120"}
    )


def rows(result: Result) -> list[list[str]]:
    """Return the cells of a printed table."""
    assert 0 == result.exit_code, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_a_token_shows_its_caller_and_what_anyone_may_do(files: tuple[Path, Path]) -> None:
    rules, token = files

    assert rows(check(rules, "--token-file", token)) == [
        ["alice", "infer", "digits, mlp-*", "all"],
        ["alice", "readiness", "digits, mlp-*", "all"],
        ["everybody", "health", "all", "all"],
    ]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["alice", "alice", "operator", "operator", "everybody"]),
        (["--as", "operator"], ["operator", "operator", "everybody"]),
        (["--as", "alice", "--model", "mlp-2"], ["alice", "alice", "everybody"]),
        (["--as", "alice", "--model", "other"], ["everybody"]),
    ],
)
def test_callers_are_asked_for_by_name(
    files: tuple[Path, Path], arguments: list[str], names: list[str]
) -> None:
    assert [row[0] for row in rows(check(files[0], *arguments))] == names


def test_a_caller_that_may_do_nothing_with_a_model_ends_with_1(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[caller]]\nname = "a"\nallow = ["infer"]\nmodels = ["m"]\nanyone = true\n')

    result = check(rules, "--model", "other")

    assert 1 == result.exit_code
    assert f"{rules}: no operation is allowed with model 'other'" == result.output.strip()


@pytest.mark.parametrize(
    ("rules", "arguments", "text"),
    [
        (RULES, ["--as", "bob"], "expected a caller of the rules (alice, everybody, operator)"),
        (RULES, ["--as", "subject:bob"], "--as: expected a caller of the rules"),
        ("allow = 1", [], "setting access_rules"),
    ],
)
def test_what_is_not_there_is_said(
    tmp_path: Path, rules: str, arguments: list[str], text: str
) -> None:
    path = tmp_path / "rules.toml"
    digests = [f"sha256:{letter * 64}" for letter in "ab"]
    path.write_text(rules.format(digest=digests[0], other=digests[1]))

    assert text in str(check(path, *arguments).exception)


def test_a_token_of_nobody_is_said(files: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("xla_none")

    assert "no caller has the token" in str(check(files[0], "--token-file", other).exception)
