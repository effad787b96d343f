"""A token for its owner, and its hash for the rules file."""

from typer.testing import CliRunner

from xlaserve.cli import application
from xlaserve.serving.access.rules_file import parse_rules
from xlaserve.serving.access.tokens import bearer, digest_of
from xlaserve.serving.call import Operation


def lines(*arguments: str) -> list[str]:
    result = CliRunner().invoke(application(), ["token", *arguments])
    assert 0 == result.exit_code, result.output
    return result.output.splitlines()


def test_the_line_for_the_rules_knows_the_token() -> None:
    token, line = lines()

    assert f'token = "{digest_of(token)}"' == line
    assert token == bearer(f"Bearer {token}")
    assert 43 <= len(token.removeprefix("xla_"))


def test_no_token_is_made_twice() -> None:
    assert lines()[0] != lines()[0]


def test_a_whole_entry_is_read_as_it_was_printed() -> None:
    token, *entry = lines("--name", 'team "a"')

    (caller,) = parse_rules("\n".join(entry).encode(), is_json=False).callers
    assert {Operation.INFER} == caller.allow
    assert 'team "a"' == caller.name
    assert frozenset({digest_of(token)}) == caller.tokens
