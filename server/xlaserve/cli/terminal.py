"""A terminal read key by key, and restored however the program ends."""

import os
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from typing import Self

_BEGIN = "\x1b[?1049h\x1b[?25l"
"""The other screen of the terminal, without a cursor."""
_END = "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_MOST_BYTES = 1024

_SEQUENCES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
}


class Terminal:
    """The terminal on standard input and output; a context manager that gives it back."""

    def __init__(self) -> None:
        self.keys = sys.stdin.fileno()
        """The descriptor that keys are read of."""
        self._saved: list[object] | None = None

    @classmethod
    def is_there(cls) -> bool:
        """Tell whether the terminal is interactive."""
        return sys.stdin.isatty() and sys.stdout.isatty()

    @property
    def size(self) -> tuple[int, int]:
        """The columns and lines that it has now, whatever an environment says that it began with.

        One that does not know its size (it says 0) counts as one of 80 x 24.
        """
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        return columns or 80, lines or 24

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *raised: object) -> None:
        self.give_back()

    def take(self) -> None:
        """Show the other screen, and have keys come without a line's end."""
        self._saved = termios.tcgetattr(self.keys)
        # Ctrl-C and Ctrl-Z stay signals.
        tty.setcbreak(self.keys)
        self._write(_BEGIN)

    def give_back(self) -> None:
        """Leave the terminal as it was; a second time does nothing."""
        saved, self._saved = self._saved, None
        if saved is not None:
            try:
                self._write(_END)
            finally:
                termios.tcsetattr(self.keys, termios.TCSADRAIN, saved)  # type: ignore[arg-type]

    def read(self) -> list[str]:
        """Return pressed keys; raises EOFError once the terminal is gone."""
        try:
            pressed = os.read(self.keys, _MOST_BYTES)
        except OSError as error:  # the terminal is gone
            raise EOFError from error
        if not pressed:
            raise EOFError
        return list(keys_of(pressed.decode(errors="replace")))

    def show(self, lines: Sequence[str]) -> None:
        """Show lines in place of all that was shown."""
        text = f"{_REST_OF_LINE}\r\n".join(lines)
        self._write(f"{_HOME}{text}{_REST_OF_LINE}{_REST_OF_SCREEN}")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def keys_of(text: str) -> Iterator[str]:
    """Yield the keys in a terminal's input, ignoring unknown ones."""
    while text:
        found = next((each for each in _SEQUENCES if text.startswith(each)), "")
        if found == "\x1b" and text[1:2] in ("[", "O"):
            end = next((at for at, each in enumerate(text[2:], 2) if "@" <= each <= "~"), len(text))
            text = text[end + 1 :]
        elif found:
            yield _SEQUENCES[found]
            text = text[len(found) :]
        else:
            if text[0].isprintable():
                yield text[0]
            text = text[1:]
