"""Runs the row analysis on StableHLO programs written as text."""

import re

from xlaserve.row_proofs import Verdict, program, refining
from xlaserve.row_proofs.proof import PAIRS, walked

ROW = "%x: tensor<Bx4xf32>"
_SIZE = re.compile(r"(?:(?<=[<x\[:])|(?<=[,:] ))(\d*)B(?=[x,\]:>])")


def verdict_of(body: str, returned: str, arguments: str = ROW, *, second: str = "") -> Verdict:
    """Analyze a program with batch size `B`; `second` is the body for the second size."""
    texts = [_text(body, returned, arguments, PAIRS[0][0])]
    texts.append(_text(second or body, returned, arguments, PAIRS[0][1]))
    with refining.parsing():
        modules = [refining.parse(text) for text in texts]
        read = program.read(modules[0], modules[1], PAIRS[0])
        return walked(read, range(arguments.count("B")), ["y"])


def _text(body: str, returned: str, arguments: str, rows: int) -> str:
    kind = returned.partition(":")[2].strip()
    text = f"func.func public @main({arguments}) -> ({kind}) {{\n{body}\nreturn {returned}\n}}"
    return sized(text, rows)


def sized(text: str, rows: int) -> str:
    """Return a program with `B` replaced by the number of rows, and `2B` by twice that."""

    def of_rows(found: re.Match[str]) -> str:
        return str(int(found[1] or 1) * rows)

    return _SIZE.sub(of_rows, text)
