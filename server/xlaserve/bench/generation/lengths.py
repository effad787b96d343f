"""Lengths of prompts and answers: drawn at random, or read from a file."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np

from xlaserve.bench.errors import BenchmarkRefused

PROMPT_MEAN, ANSWER_MEAN = 161.0, 338.0
"""Mean tokens of ShareGPT's prompts and answers (Kwon et al. 2023, figure 11)."""
SPREAD = 1.0
"""Standard deviation of the logarithms. This value is our choice: the figure only has means."""
LONGEST = 2048
"""Default maximum of prompt and answer tokens together; longer pairs are drawn again."""

_MOST_LINES = 100_000
_MOST_BYTES = 1 << 24
_BLOCK = 4096
"""Number of pairs drawn at a time."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of one request's prompt and answer, in tokens."""

    prompt: int
    answer: int


def drawn(seed: int, longest: int = LONGEST) -> Iterator[Lengths]:
    """Yield an infinite sequence of independent, log-normal lengths, determined by the seed.

    Pairs longer than `longest` in total are drawn again, which reduces the means. Raises
    BenchmarkRefused if hardly any pair is short enough.
    """
    random = np.random.default_rng(seed)
    means = np.log([PROMPT_MEAN, ANSWER_MEAN]) - SPREAD**2 / 2
    while True:
        sizes = np.ceil(np.exp(random.normal(means, SPREAD, (_BLOCK, 2)))).astype(np.int64)
        fitting = sizes[sizes.sum(axis=1) <= longest].tolist()
        if not fitting:
            raise BenchmarkRefused(
                f"--longest {longest}: too short, prompts and answers have {PROMPT_MEAN:g} and "
                f"{ANSWER_MEAN:g} tokens on average"
            )
        yield from (Lengths(prompt, answer) for prompt, answer in fitting)


def read(path: Path) -> Sequence[Lengths]:
    """Read lengths from a JSON Lines file with lines such as `{"prompt": 161, "answer": 338}`.

    Raises BenchmarkRefused, naming the line, if the file is invalid.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        problem = error.strerror or error
        raise BenchmarkRefused(f"--lengths: '{path}' cannot be read: {problem}") from error
    if len(data) > _MOST_BYTES:
        raise BenchmarkRefused(f"--lengths: '{path}' has more than {_MOST_BYTES} bytes")
    lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not 0 < len(lines) <= _MOST_LINES:
        expected = f"1 to {_MOST_LINES} lines"
        raise BenchmarkRefused(f"--lengths: '{path}': expected {expected}, got {len(lines)}")
    return [_line(path, number, line) for number, line in lines]


def written(pairs: Iterator[Lengths], count: int) -> str:
    """Return the text of a file for `read` with the first `count` pairs."""
    lines = (msgspec.json.encode(asdict(pair)) for pair in itertools.islice(pairs, count))
    return "".join(f"{line.decode()}\n" for line in lines)


def _line(path: Path, number: int, line: bytes) -> Lengths:
    where = f"--lengths: '{path}', line {number}"
    try:
        found = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        expected = 'expected {"prompt": 161, "answer": 338}'
        raise BenchmarkRefused(f"{where}: {expected}: {error}") from error
    if min(found.prompt, found.answer) < 1:
        got = f"{found.prompt} and {found.answer}"
        expected = "at least one token in the prompt and in the answer"
        raise BenchmarkRefused(f"{where}: expected {expected}, got {got}")
    return Lengths(found.prompt, found.answer)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: int
    answer: int


_DECODER = msgspec.json.Decoder(_Line)
