"""Streamed detokenization equals decoding all tokens at once, with no text sent too early."""

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import tokenizers as small
from tokenizers import Tokenizer

from xlaserve.errors import InvalidModel, InvalidParameter
from xlaserve.language import decoders
from xlaserve.language.stop_strings import StopStrings
from xlaserve.language.text import LanguageText
from xlaserve.language.tokenizing import Tokens

KINDS = st.sampled_from(sorted(small.KINDS))
TEXT = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("aeiou tesh 😀👩‍é日.,'!?")),
    max_size=40,
)


@cache
def made(kind: str) -> Tokenizer:
    return small.KINDS[kind]()


@cache
def tokens(kind: str) -> Tokens:
    return Tokens(json.loads(made(kind).to_str()), "m")


@cache
def text_of(kind: str) -> LanguageText:
    return LanguageText(tokens(kind), None, None, "m")  # type: ignore[arg-type]


def pieces(kind: str, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    detokenizer = text_of(kind).detokenizer(stop)
    return [*map(detokenizer.push, ids), detokenizer.end()], detokenizer.stopped


@settings(max_examples=60)
@given(kind=KINDS, text=TEXT)
def test_pieces_of_a_text_are_together_what_the_package_decodes(kind: str, text: str) -> None:
    ids = made(kind).encode(text).ids
    found, stopped = pieces(kind, ids)

    assert small.reference(made(kind), ids) == "".join(found)
    assert stopped is None


@settings(max_examples=60)
@given(kind=KINDS, data=st.data())
def test_pieces_of_any_tokens_are_what_the_package_decodes(kind: str, data: st.DataObject) -> None:
    """Including special tokens, unknown tokens and invalid bytes.

    Exception: for a run of byte tokens with an invalid part, the package replaces the whole run,
    and this server only the invalid part.
    """
    whole, size = kind == "byte_fallback", made(kind).get_vocab_size()
    number = st.integers(0, size + 2)
    if whole:
        number = number.filter(
            lambda token: not (made(kind).id_to_token(token) or "").startswith("<0x")
        )
    ids = data.draw(st.lists(number, max_size=30))

    assert small.reference(made(kind), ids) == "".join(pieces(kind, ids)[0])


@settings(max_examples=60)
@given(data=st.binary(max_size=12), text=st.sampled_from(["The", "é😀"]))
def test_broken_bytes_of_a_run_are_replaced_one_by_one(data: bytes, text: str) -> None:
    """Valid characters within the run are kept."""
    ids = [tokens("byte_fallback").id_of(f"<0x{byte:02X}>") for byte in text.encode() + data]
    found = "".join(pieces("byte_fallback", [token for token in ids if token is not None])[0])

    broken = sum("\ufffd" == letter for letter in found)
    assert found.startswith(text)
    # A replacement character for each byte that belongs to no complete character.
    assert len(text.encode() + data) == len(found.replace("\ufffd", "").encode()) + broken or (
        b"\xef\xbf\xbd" in data
    )


def test_an_emoji_cut_between_tokens_is_sent_whole() -> None:
    ids = made("byte_level").encode("a 😀b").ids
    found, _ = pieces("byte_level", ids)

    assert len(ids) > 4
    assert ["a 😀b", True] == ["".join(found), "😀" in found]
    assert not any("\ufffd" in piece for piece in found)


def test_half_a_character_at_the_end_is_replaced() -> None:
    ids = made("byte_level").encode("😀").ids[:1]

    assert ["", "\ufffd"] == pieces("byte_level", ids)[0]


def letters(text: str) -> list[int]:
    """Return one token per letter."""
    return [made("byte_level").get_vocab()[letter] for letter in text]


# --- stop strings ------------------------------------------------------------------------------


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text before the first complete stop string, searched naively."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@example(text="aaab", stops=["aab"], sizes=[1] * 24)
@example(text="ababac", stops=["abac"], sizes=[4] * 24)
@settings(max_examples=60)
@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    sizes=st.lists(st.integers(1, 4), min_size=24, max_size=24),
)
def test_stop_strings_end_the_text_however_it_is_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    found, rest, sent = StopStrings(stops), text, ""
    expected, stopped = cut(text, stops)
    for size in sizes:
        sent += found.push(rest[:size])
        rest = rest[size:]
        assert expected.startswith(sent)
    sent += found.end()

    assert (expected, stopped) == (sent, found.found)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    """The next character may complete it; a character that does not releases the text before it."""
    ids = letters("abENENDx")
    found, stopped = pieces("byte_level", ids, ("END",))

    assert ["a", "b", "", "", "EN", "", "", "", ""] == found
    assert "END" == stopped


def test_a_text_that_ends_within_a_stop_string_is_sent_whole() -> None:
    ids = letters("aEN")

    assert (["a", "", "", "EN"], None) == pieces("byte_level", ids, ("END",))


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ([""], "parameter 'stop': expected strings of 1 to 1024 characters, got one of 0"),
        (["x" * 1025], "parameter 'stop': expected strings of 1 to 1024 characters, got one of"),
        (["x"] * 17, "parameter 'stop': expected at most 16 strings, got 17"),
    ],
)
def test_stop_strings_that_are_none_are_refused(stop: list[str], text: str) -> None:
    with pytest.raises(InvalidParameter, match=text):
        text_of("words").detokenizer(stop)


# --- decoders ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "CTC"},
        {"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Sequence", "decoders": [{"type": "BPEDecoder"}, {"type": "Fuse"}]},
        {"type": "Sequence"},
        ["Fuse"],
    ],
)
def test_decoders_that_need_the_whole_text_are_refused(decoder: object) -> None:
    with pytest.raises(InvalidModel, match="tokenizer.json: expected a (streaming )?decoder"):
        decoders.read(decoder)


def test_a_decoder_that_is_nested_without_end_is_refused() -> None:
    nested: object = {"type": "Fuse"}
    for _ in range(2000):
        nested = {"type": "Sequence", "decoders": [nested]}

    with pytest.raises(InvalidModel):
        decoders.read(nested)


def test_the_first_spaces_of_the_text_are_stripped(tmp_path: Path) -> None:
    """They are stripped from the whole text, not from each token; Llama's decoder says how many."""
    found = pieces("byte_fallback", made("byte_fallback").encode("The dog  the").ids)[0]

    assert "The dog  the" == "".join(found)
