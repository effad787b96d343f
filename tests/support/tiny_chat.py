"""The tiny language model with a 32-token tokenizer and a chat template."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from support import tiny_language

LETTERS = "abcdefghijklmnopqrstuvwxy\n"
SPECIAL = ("<unk>", "<s>", "<|user|>", "<|assistant|>", "<|system|>", "</s>")
TEMPLATE = (
    "<s>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "<|assistant|>"
)
CONFIG = {"slots": "4", "windows": "64", "chunk": "8"}


def export(path: Path, *, max_length: int = tiny_language.LENGTH, **config: str) -> Path:
    """Export the model into `path`/1, and write its configuration."""
    tiny_language.export(path / "1", max_length=max_length)
    tokenizer().save(str(path / "1" / "tokenizer.json"))
    (path / "1" / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE})
    )
    given = {**CONFIG, "windows": str(max_length), **config}
    written = {name: {"string_value": value} for name, value in given.items()}
    (path / "config.json").write_text(json.dumps({"parameters": written}))
    return path


def tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per letter, and the stop token of tiny_language."""
    names = [*SPECIAL, *LETTERS]
    assert len(names) == tiny_language.VOCAB
    assert names[tiny_language.STOP] == "</s>"
    vocabulary = {name: number for number, name in enumerate(names)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return made


def tokens_of(text: str) -> list[int]:
    """Encode a text of letters."""
    return [len(SPECIAL) + LETTERS.index(letter) for letter in text]


def text_of(tokens: list[int]) -> str:
    """Decode tokens, without special ones."""
    return "".join(LETTERS[one - len(SPECIAL)] for one in tokens if one >= len(SPECIAL))
