"""Incremental detokenization: converts streamed tokens to text."""

from collections.abc import Callable, Sequence

from xlaserve.language.decoders import Decoder
from xlaserve.language.stop_strings import StopStrings

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one answer, without incomplete characters or stop strings.

    The concatenation of all `push` and `end` results equals `LanguageText.decode` of all tokens, up
    to the stop string.
    """

    def __init__(
        self, decoder: Decoder, token_text: Callable[[int], str | None], stop: Sequence[str] = ()
    ) -> None:
        """`token_text` returns the vocabulary entry of a token, or None for tokens without text.

        Raises InvalidParameter for invalid stop strings.
        """
        self._decoder = decoder
        self._token_text = token_text
        self._stops = StopStrings(stop)
        self._is_first = True
        self._bytes = b""
        """Bytes of an incomplete character."""
        self._word_ends = ""
        """Word-end suffixes held back: they become spaces if another token follows."""
        self._stripped, self._strips = decoder.stripped

    @property
    def stopped(self) -> str | None:
        """Return the stop string that ended the text, or None."""
        return self._stops.found

    def push(self, token: int) -> str:
        """Return the text that can be sent now; special and unknown tokens have none."""
        found = self._token_text(token)
        if found is None:
            return ""
        piece = self._decoder.piece(found, is_first=self._is_first)
        if isinstance(piece, bytes):
            text = self._characters(piece)
        else:
            # A text token ends a run of bytes: flush an incomplete character.
            text = self._characters(b"", is_last=True) + self._words(piece)
        self._is_first = False
        return self._stops.push(self._strip(text))

    def end(self) -> str:
        """Return the remaining text; nothing may be pushed afterwards."""
        text = self._characters(b"", is_last=True) + self._word_ends.replace(
            self._decoder.word_end or " ", ""
        )
        self._word_ends = ""
        return self._stops.push(self._strip(text)) + self._stops.end()

    def _words(self, piece: str) -> str:
        """Return the text of a token; hold back its word-end suffix, which the last token drops."""
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
        """Return the complete characters, and keep the bytes of an incomplete one."""
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
