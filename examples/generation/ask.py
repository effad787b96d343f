"""Have a served model continue a story, and print the tokens as they arrive.

    python examples/generation/ask.py build/story "The with statement"

The server takes and returns tokens; the model's tokenizer converts text to tokens and back.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from xlaserve.client import Client


def answered(
    client: Client, tokenizer: Tokenizer, prompt: str, **parameters: float
) -> Iterator[str]:
    """Yield the pieces of text that follow the prompt, each once it is complete."""
    tokens = np.array(tokenizer.encode(prompt).ids, np.int32)
    decoding = DecodeStream(skip_special_tokens=True)
    for answer in client.stream("story", {"tokens": tokens}, parameters=parameters):
        # A character may take several tokens; there is no text until the last of them.
        yield decoding.step(tokenizer, int(answer.tensors["token"][0])) or ""


def main() -> None:
    """Print a prompt and its answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="what train.py wrote, with tokenizer.json")
    parser.add_argument("prompt")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(asked.checkpoint / "tokenizer.json"))
    chosen = {name: getattr(asked, name) for name in ("max_tokens", "temperature", "seed")}
    print(asked.prompt, end="", flush=True)
    with Client(asked.url) as client:
        for text in answered(client, tokenizer, asked.prompt, **chosen):
            print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
