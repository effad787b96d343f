"""Write small encoders as sentence-transformers saves them, with the embeddings it computes.

Needs sentence-transformers, transformers and torch: python tools/encoder_references.py
tests/data/encoders [NAME ...]

Tensors have the names and shapes of a saved checkpoint; their values are derived from their names,
so that they need not be stored.
"""

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from huggingface_references import seeded

TEXTS = ("hello", "a", "hello there world", "there a a hello world world a hello there")
WORDS = ("<pad>", "<unk>", "<s>", "</s>", "<mask>", "hello", "there", "world", "a")
_SMALL = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
_DISTIL = {
    "vocab_size": len(WORDS),
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
CASES: Mapping[str, tuple[str, str, Mapping[str, Any], str, bool]] = {
    "bert": ("Bert", "Model", _SMALL, "mean", True),
    "bert-masked": ("Bert", "ForMaskedLM", _SMALL, "weightedmean", False),
    "roberta": ("Roberta", "Model", _SMALL, "cls", True),
    "xlm-roberta": ("XLMRoberta", "Model", _SMALL, "lasttoken", False),
    "mpnet": ("MPNet", "Model", _SMALL, "mean", True),
    "distilbert": ("DistilBert", "Model", _DISTIL, "max", False),
}
"""Family, kind, further fields of config.json, pooling, and whether embeddings are normalised."""
_NORMS = ("LayerNorm.weight", "layer_norm.weight")


def numbers_of(name: str, shape: tuple[int, ...]) -> Any:
    """Return a tensor's values: around 1 for norms, and large enough to matter for matrices."""
    found = seeded(name, shape)
    return found + 1 if name.endswith(_NORMS) else 3 * found


def main(place: Path, names: Sequence[str]) -> None:
    """Write a directory for each case, or only for the named ones."""
    for name in names or CASES:
        _write(place / name, *CASES[name])


def _write(  # noqa: PLR0917, the columns of CASES
    place: Path, family: str, kind: str, stated: Mapping[str, Any], pooling: str, normal: bool
) -> None:
    transformers, library = map(importlib.import_module, ("transformers", "sentence_transformers"))
    models = importlib.import_module("sentence_transformers.models")
    torch = importlib.import_module("torch")
    config = getattr(transformers, f"{family}Config")(**stated)
    model = getattr(transformers, f"{family}{kind}")(config)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        model.save_pretrained(made)
        _tokenizer(transformers).save_pretrained(made)
        shapes = _fill(made)
        modules = [
            models.Transformer(str(made), max_seq_length=24),
            models.Pooling(32, pooling_mode=pooling),
            *([models.Normalize()] if normal else []),
        ]
        whole = library.SentenceTransformer(modules=modules, device="cpu").eval()
        with torch.no_grad():
            found = whole.encode(list(TEXTS), batch_size=len(TEXTS), convert_to_numpy=True)
        saved = Path(folder) / "saved"
        whole.save(str(saved))
        if place.exists():
            shutil.rmtree(place)
        unstored = shutil.ignore_patterns("*.safetensors", "README.md")
        shutil.copytree(saved, place, ignore=unstored)
        # Keep the config.json that transformers wrote: its class has the head, and matches the
        # tensor names.
        shutil.copyfile(made / "config.json", place / "config.json")
    (place / "shapes.json").write_text(json.dumps(shapes, indent=0) + "\n", encoding="utf-8")
    np.savez_compressed(place / "references.npz", embeddings=found)


def _tokenizer(transformers: Any) -> Any:
    parts = importlib.import_module("tokenizers")
    made = parts.Tokenizer(
        parts.models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<unk>")
    )
    made.pre_tokenizer = parts.pre_tokenizers.Whitespace()
    made.decoder = parts.decoders.WordPiece()
    made.post_processor = parts.processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", WORDS.index("<s>")), ("</s>", WORDS.index("</s>"))],
    )
    special = dict(zip(("pad", "unk", "bos", "eos", "mask"), WORDS, strict=False))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": word for name, word in special.items()},
    )


def _fill(directory: Path) -> dict[str, list[int]]:
    """Fill a checkpoint's tensors with values derived from their names; return the shapes."""
    safetensors = importlib.import_module("safetensors.numpy")
    file = directory / "model.safetensors"
    shapes = {name: list(array.shape) for name, array in safetensors.load_file(file).items()}
    numbers = {name: numbers_of(name, tuple(shape)) for name, shape in shapes.items()}
    safetensors.save_file(numbers, file, metadata={"format": "pt"})
    return shapes


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
