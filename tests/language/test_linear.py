"""Tokenizers known to run in linear time, and how the others are stopped."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import tokenizers as small

from xlaserve.errors import InvalidModel
from xlaserve.errors.language import NotText, SpelledSpecialToken, TokenizerFailed
from xlaserve.language import tokenizing
from xlaserve.language.limited import Limited, LimitedProcess, Limits
from xlaserve.language.linear import PATTERNS, is_linear
from xlaserve.language.tokenizing import Tokens

BACKTRACKING = "(?:a|b)+(?:a|b)+[cx]"
"""Cubic in the length of a text of a and b; no match exceeds the library's limit."""
LONG = "ab" * 700


def split(pattern: str) -> dict[str, Any]:
    behavior = {"behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, **behavior}}


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(text: bytes) -> str:
    return base64.b64encode(b"\4\0\0\0" + bytes(4) + text + b"\0").decode()


MANY = ["a", "b"] * 20
FOREIGN: dict[str, dict[str, Any]] = {
    "a regular expression that goes back": split(BACKTRACKING),
    "one within a sequence": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Whitespace"}, split("(a*)*b")["pre_tokenizer"]],
        }
    },
    "one of a normalizer": {"normalizer": replaced({"Regex": "(a|a)*b"}, "")},
    "a text that doubles again and again": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [replaced({"String": one}, "ab"[::-1] * 2) for one in MANY],
        }
    },
    "a character that becomes many": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"x" * 100)}
    },
    "long words of WordPiece": {
        "model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**6}
    },
    "long tokens of Unigram": {"model": {"type": "Unigram", "vocab": [["a" * 2000, 0.0]]}},
    "much around a text": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1000,
        }
    },
    "a part that is not known": {"pre_tokenizer": {"type": "New"}},
    "a part without a type": {"normalizer": {}},
    "no model": {"model": None},
}


def file_of(**changed: Any) -> dict[str, Any]:
    """Return a tokenizer with a token for each of some letters, with changes."""
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    vocab = {one: number for number, one in enumerate([*small.SPECIAL, *"abcx "])}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": id_, "content": text, "special": True, **added}
            for id_, text in enumerate(small.SPECIAL)
        ],
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        **changed,
    }


@pytest.fixture(name="parsed")
def _parsed() -> Iterator[Callable[..., Tokens]]:
    made: list[Tokens] = []

    def parse(**changed: Any) -> Tokens:
        made.append(tokenizing.parse(json.dumps(file_of(**changed)).encode(), "m"))
        return made[-1]

    yield parse
    for one in made:
        one.close()


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_may_take_long_is_not_taken_for_quick(kind: str) -> None:
    assert not is_linear(file_of(**FOREIGN[kind]))
    assert is_linear(file_of())


@pytest.mark.parametrize(
    "make",
    [
        small.byte_level,
        small.byte_fallback,
        small.word_piece,
        small.word_ends,
        small.unigram,
        small.words,
        small.letters,
    ],
    ids=lambda make: make.__name__,
)
def test_those_of_known_models_are_quick(make: Callable[[], Any]) -> None:
    assert is_linear(json.loads(make().to_str()))


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_known_patterns_are_split_in_the_server(pattern: str) -> None:
    assert is_linear(file_of(**split(pattern)))


def test_a_quick_tokenizer_has_no_process(parsed: Callable[..., Tokens]) -> None:
    tokens = parsed()

    assert tokens.thread is None
    assert tokens._limited is None
    assert [4, 5] == tokens.encode("ab")


def test_a_text_that_takes_too_much_is_refused_and_the_next_is_not(
    parsed: Callable[..., Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tokenizing,
        "Limited",
        lambda program, _, first, **named: Limited(program, Limits(0.1), first, **named),
    )
    tokens = parsed(**split(BACKTRACKING))
    found = [tokens.encode("abc")]
    assert tokens._limited is not None
    process = tokens._limited._process
    with pytest.raises(TokenizerFailed) as refused:
        tokens.encode(LONG)
    found.append(tokens.encode("abc"))

    # The forked process has exited, and another has replaced it immediately.
    assert process is tokens._limited._process

    assert [[4, 5, 6]] * 2 == found
    assert (
        "model 'm': its tokenizer failed on the text: it exceeds its limits of 0.1 CPU"
        " seconds and 536870912 bytes of memory"
    ) == str(refused.value)


def test_a_text_that_grows_too_large_is_refused(parsed: Callable[..., Tokens]) -> None:
    tokens = parsed(**FOREIGN["a text that doubles again and again"])

    with pytest.raises(TokenizerFailed, match="exceeds"):
        tokens.encode("a" * 100)
    assert [] == tokens.encode("")


def test_what_panics_is_the_fault_of_the_text(parsed: Callable[..., Tokens]) -> None:
    """The library panics if one match backtracks too often."""
    tokens = parsed(**split("(a+)+b"))

    with pytest.raises(TokenizerFailed, match="model 'm': its tokenizer failed"):
        tokens.encode("a" * 60)
    assert [4, 5] == tokens.encode("ab")


def test_special_tokens_are_none_there_either(parsed: Callable[..., Tokens]) -> None:
    tokens = parsed(**split(BACKTRACKING), model=file_of()["model"] | {"unk_token": "x"})
    normalizer = replaced({"Regex": "y|q"}, small.BEGIN)
    spelled = parsed(normalizer=normalizer, model=file_of()["model"])

    assert [1] == tokens.encode_marked(small.END)
    assert 1 not in tokens.encode(f"a{small.END}b")
    assert [4, 5] == spelled.encode("ab")
    with pytest.raises(NotText):
        tokens.encode("a\ud800")
    with pytest.raises(SpelledSpecialToken):
        parsed(normalizer=normalizer, model=_pieces()).encode("y")


def _pieces() -> dict[str, Any]:
    """Return a model in which other tokens can spell a special token."""
    vocab = [[text, -1.0] for text in [*small.SPECIAL, *"abcx "]]
    return {"type": "Unigram", "unk_id": 7, "vocab": vocab}


def test_a_process_that_was_killed_is_started_again(parsed: Callable[..., Tokens]) -> None:
    tokens = parsed(**split(BACKTRACKING))
    assert [4, 5] == tokens.encode("ab")
    assert tokens._limited is not None
    running = tokens._limited._process
    assert isinstance(running, LimitedProcess)
    running._process.kill()
    running._process.wait()

    assert [4, 5] == tokens.encode("ab")


def test_a_load_whose_unknown_token_is_tried_elsewhere_fails_as_others(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "[UNK]"}

    with pytest.raises(InvalidModel, match="expected unk_token in the vocabulary"):
        tokenizing.parse(json.dumps({**split("(a|b)*c"), "model": model}).encode(), "m")
