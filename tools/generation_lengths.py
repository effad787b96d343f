"""Draw lengths of prompts and answers like those of conversations, for `xlaserve bench --generate`.

python tools/generation_lengths.py --count 1000 --longest 2048 --seed 1 > lengths.jsonl

With a file, every server and every run gets the same load, whichever version drew it.
"""

import argparse
import sys

from xlaserve.bench.generation.lengths import LONGEST, drawn, written


def main() -> None:
    """Print JSON Lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="number of pairs")
    parser.add_argument("--longest", type=int, default=LONGEST, help="most tokens of a pair")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    sys.stdout.write(written(drawn(asked.seed, asked.longest), asked.count))


if __name__ == "__main__":
    main()
