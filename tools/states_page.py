"""Write the table of states in docs/operations.md from the code, or prove it fresh (`--check`)."""

import argparse
import sys
from pathlib import Path

from xlaserve.errors import RepositoryUnreadable, XlaserveError
from xlaserve.net.status import wire_status
from xlaserve.serving.standing import STATES, Row, Standing, State

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
_BEGIN, _END = "<!-- states, by tools/states_page.py -->\n", "<!-- end states -->\n"
_HEAD = "| state | meaning | server ready | model lists | unknown models |\n|---|---|---|---|---|\n"


def table() -> str:
    """Return the rows, one for each state."""
    return _HEAD + "".join(
        f"| {state.value} | {row.says} | {'see `--readiness`' if row.is_settled else 'no'} "
        f"| {_listed(row)} | {_absent(state)} |\n"
        for state, row in STATES.items()
    )


def _listed(row: Row) -> str:
    return "answered" if row.is_listed else _named(RepositoryUnreadable("", ""))


def _absent(state: State) -> str:
    error = Standing(state).absent("m")
    assert isinstance(error, XlaserveError)
    return _named(error)


def _named(error: XlaserveError) -> str:
    status = wire_status(error)
    return f"{status.grpc.name}, {int(status.http)}"


def page(text: str) -> str:
    """Return the page with the regenerated table."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return before + _BEGIN + table() + _END + after


def main() -> int:
    """Write or check the page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where the page is not fresh")
    text = PAGE.read_text()
    made = page(text)
    if parser.parse_args().check:
        if made != text:
            sys.stderr.write(f"{PAGE} is not fresh: run python tools/states_page.py\n")
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
