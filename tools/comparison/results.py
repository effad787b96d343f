"""The results file of a comparison, written after each row so that a run can be resumed."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from comparison.interleaving import Numbers
from comparison.rows import ROWS, Row


@dataclass(slots=True)
class Results:
    """All results so far."""

    conditions: dict[str, str] = field(default_factory=dict)
    message_bytes: int = 0
    """Size of the large message."""
    contenders: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, Numbers]] = field(default_factory=dict)
    """The numbers of each contender, by name of the row."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return a file's contents."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Replace the file atomically."""
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(path)

    def measured(self) -> list[Row]:
        """Return the rows that have results, in table order."""
        return [row for row in ROWS if row.name in self.rows]
