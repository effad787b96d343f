"""Export the model that train.py trained, to be served without its code.

python examples/generation/export.py build/story models/story/2
"""

import sys
from pathlib import Path

import gpt
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from xlaserve import export_generator

PARAMETERS = "model.safetensors"
TOKENIZER = "tokenizer.json"
END = "<|end|>"
"""The token that separates texts and ends an answer."""


def export(checkpoint: Path, version: Path) -> Path:
    """Export a checkpoint to `<model>/<version>`, and return that path."""
    params = load_file(checkpoint / PARAMETERS)
    tokenizer = Tokenizer.from_file(str(checkpoint / TOKENIZER))
    return write(params, tokenizer.token_to_id(END), checkpoint / TOKENIZER, version)


def write(params: gpt.Parameters, end: int, tokenizer: Path, version: Path) -> Path:
    """Export parameters and a tokenizer file; the token `end` ends answers."""
    functions = gpt.cached(params)
    return export_generator(
        functions.decode,
        functions.chunk,
        functions.init_cache,
        params,
        version,
        vocab=params["embedding"].shape[0],
        max_length=params["position"].shape[0],
        stop_tokens=[end],
        files={TOKENIZER: tokenizer},
        overwrite=True,
    )


if __name__ == "__main__":
    print(export(Path(sys.argv[1]), Path(sys.argv[2])))
