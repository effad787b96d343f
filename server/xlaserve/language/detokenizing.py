"""Tokens that come one by one become text that may be sent."""

from collections.abc import Callable, Sequence

from xlaserve.language.decoders import Decoder
from xlaserve.language.stop_strings import StopStrings

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one answer: whole characters, and no part of a stop string.

    What all pushes and the end return is together what `LanguageText.decode` returns for all
    tokens, up to the stop string.
    """

    def __init__(
        self, decoder: Decoder, token_text: Callable[[int], str | None], stop: Sequence[str] = ()
    ) -> None:
        """`token_text` returns a token as the vocabulary has it, None for those without text.

        Raises InvalidParameter for stop strings that are none.
        """
        self._decoder = decoder
        self._token_text = token_text
        self._stops = StopStrings(stop)
        self._is_first = True
        self._bytes = b""
        """The beginning of a character."""
        self._word_ends = ""
        """Ends of a word that are a space once another token follows."""
        self._stripped, self._strips = decoder.stripped

    @property
    def stopped(self) -> str | None:
        """Return the stop string that ended the text, None while there is none."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Return the text that may be sent now; special and unknown tokens have none."""
        found = self._token_text(token)
        if found is None:
            return ""
        piece = self._decoder.piece(found, is_first=self._is_first)
        if isinstance(piece, bytes):
            text = self._characters(piece)
        else:
            # Text in between: what was the beginning of a character remains one.
            text = self._characters(b"", is_last=True) + self._words(piece)
        self._is_first = False
        return self._stops.push(self._strip(text))

    def end(self) -> str:
        """Return the rest of the text; nothing is pushed after it."""
        text = self._characters(b"", is_last=True) + self._word_ends.replace(
            self._decoder.word_end or " ", ""
        )
        self._word_ends = ""
        return self._stops.push(self._strip(text)) + self._stops.end()

    def _words(self, piece: str) -> str:
        """Return the text of a token, but for the end of a word: the last one is not written."""
        mark = self._decoder.word_end
        if not mark:
            return piece
        before, at, rest = piece.partition(mark)
        text = self._word_ends.replace(mark, " ") + before
        self._word_ends = at + rest
        return text

    def _strip(self, text: str) -> str:
        while self._strips and text:
            if text[0] != self._stripped:
                self._strips = 0
                break
            text = text[1:]
            self._strips -= 1
        return text

    def _characters(self, more: bytes, *, is_last: bool = False) -> str:
        """Return the characters that are complete, and keep the beginning of the next."""
        data, parts = self._bytes + more, []
        while data:
            try:
                parts.append(data.decode())
                data = b""
            except UnicodeDecodeError as error:
                parts.append(data[: error.start].decode())
                is_cut = error.reason == "unexpected end of data"
                if is_cut and not is_last:
                    data = data[error.start :]
                    break
                broken = error.end - error.start if self._decoder.keeps_runs else 1
                parts.append(_REPLACEMENT * broken)
                data = data[error.end :]
        self._bytes = data
        return "".join(parts)
