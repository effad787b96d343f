"""A terminal in single-key mode, which is restored when the program ends."""

import os
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from typing import Self

_BEGIN = "\x1b[?1049h\x1b[?25l"
"""Switches to the alternate screen, and hides the cursor."""
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
    """The terminal on standard input and output; a context manager that restores it."""

    def __init__(self) -> None:
        self.keys = sys.stdin.fileno()
        """The file descriptor from which keys are read."""
        self._saved: list[object] | None = None

    @classmethod
    def is_there(cls) -> bool:
        """Tell whether the terminal is interactive."""
        return sys.stdin.isatty() and sys.stdout.isatty()

    @property
    def size(self) -> tuple[int, int]:
        """The current number of columns and lines, ignoring COLUMNS and LINES.

        A terminal that reports a size of 0 counts as 80 x 24.
        """
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        return columns or 80, lines or 24

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *raised: object) -> None:
        self.give_back()

    def take(self) -> None:
        """Switch to the alternate screen, and read keys without waiting for Enter."""
        self._saved = termios.tcgetattr(self.keys)
        # Ctrl-C and Ctrl-Z still send signals.
        tty.setcbreak(self.keys)
        self._write(_BEGIN)

    def give_back(self) -> None:
        """Restore the terminal; a second call does nothing."""
        saved, self._saved = self._saved, None
        if saved is not None:
            try:
                self._write(_END)
            finally:
                termios.tcsetattr(self.keys, termios.TCSADRAIN, saved)  # type: ignore[arg-type]

    def read(self) -> list[str]:
        """Return the pressed keys; raises EOFError if the terminal was closed."""
        try:
            pressed = os.read(self.keys, _MOST_BYTES)
        except OSError as error:  # the terminal was closed
            raise EOFError from error
        if not pressed:
            raise EOFError
        return list(keys_of(pressed.decode(errors="replace")))

    def show(self, lines: Sequence[str]) -> None:
        """Replace everything on the screen by these lines."""
        text = f"{_REST_OF_LINE}\r\n".join(lines)
        self._write(f"{_HOME}{text}{_REST_OF_LINE}{_REST_OF_SCREEN}")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def keys_of(text: str) -> Iterator[str]:
    """Yield the keys in terminal input, ignoring unknown ones."""
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
