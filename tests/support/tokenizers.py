"""Small tokenizers, built with the package `tokenizers`, and saved next to a model."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and don't you forget it.",
    "def main(): return {'a': [1, 2, 3]}",
    "Ünïcödé naïve café, 日本語のテキスト, emoji 😀👩‍👩‍👧 and so on!",
    "user assistant system end start of text",
) * 3
BEGIN, END = "<s>", "</s>"
START, STOP = "<|im_start|>", "<|im_end|>"
SPECIAL = (BEGIN, END, START, STOP)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(size: int = 400) -> Tokenizer:
    """A byte-level tokenizer, as in GPT-2, Llama 3 and Qwen."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def byte_fallback(size: int = 500) -> Tokenizer:
    """A tokenizer with byte fallback for unknown characters, as in Llama 2 and Mistral."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    made.train_from_iterator([text for text in TEXTS if text.isascii()], trainer)
    # Byte tokens are ordinary tokens: models write text with them.
    found = json.loads(made.to_str())
    found["added_tokens"] = [
        one for one in found["added_tokens"] if not one["content"].startswith("<0x")
    ]
    return Tokenizer.from_str(json.dumps(found))


def word_piece(size: int = 300) -> Tokenizer:
    """A WordPiece tokenizer, as in BERT."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]", *SPECIAL]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def word_ends(size: int = 300) -> Tokenizer:
    """A tokenizer that marks the last token of each word, as in the first GPT."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<unk>", *SPECIAL],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def unigram(size: int = 300) -> Tokenizer:
    """A unigram tokenizer whose special tokens are among the others, as in T5."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size,
        special_tokens=["<unk>", *SPECIAL],
        unk_token="<unk>",
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def words() -> Tokenizer:
    """A word tokenizer without a decoder: tokens are joined with spaces."""
    made = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "removed")
    made.add_special_tokens(list(SPECIAL))
    return made


LETTERS = "abcdefghijklmnopqrstuvwxy "
OF_LETTERS = ("<unk>", BEGIN, START, STOP, "<pad>", END)


def letters() -> Tokenizer:
    """A letter tokenizer for the tiny language model; the last special token is the stop."""
    vocabulary = {name: number for number, name in enumerate((*OF_LETTERS, *LETTERS))}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(OF_LETTERS))
    return made


KINDS = {
    kind.__name__: kind
    for kind in (byte_level, byte_fallback, word_piece, word_ends, unigram, words)
}


def with_begin(made: Tokenizer) -> Tokenizer:
    """Make the tokenizer prepend a special token to each text, as Llama's do."""
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, made.token_to_id(BEGIN))]
    )
    return made


def save(
    folder: Path,
    made: Tokenizer,
    *,
    template: str | None = TEMPLATE,
    config: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tokenizer and its configuration to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    known = {"bos_token": BEGIN, "eos_token": {"content": STOP, "special": True}}
    written = {**known, **({"chat_template": template} if template else {}), **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def reference(made: Tokenizer, ids: Iterable[int]) -> str:
    """Return the text that the package decodes from all tokens together."""
    text: str = made.decode(list(ids), skip_special_tokens=True)
    return text
