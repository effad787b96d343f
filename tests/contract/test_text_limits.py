"""The operator's limits on text processing reach everything that processes clients' texts."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import scripted_language
from support.server import serving

from xlaserve.files.roots import ANYWHERE
from xlaserve.language.limited import Limited, Limits
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS
from xlaserve.language.text_settings import text_limits
from xlaserve.language.turns import CallerThread
from xlaserve.settings import Settings
from xlaserve.workers.fronts import texts

SAID: dict[str, Any] = {
    "template_seconds": 0.5,
    "tokenizer_seconds": 0.25,
    "grammar_seconds": 0.125,
    "text_process_bytes": 300 << 20,
    "max_waiting_texts": 7,
}
KINDS = {"chat template": 0.5, "tokenizer": 0.25, "grammar": 0.125}


def test_settings_that_nobody_gave_are_the_limits_of_code_that_is_given_none() -> None:
    assert DEFAULT_TEXT_LIMITS == text_limits(Settings(repository=Path()))


def write(root: Path) -> Path:
    """Write a model with a template, grammars, and a slow tokenizer."""
    how: dict[str, Any] = {"template": scripted_language.HERMES, "scripts": ["12"]}
    folder = scripted_language.export(root / "chat", **how, grammars="true")
    path = folder / "1" / "tokenizer.json"
    found = json.loads(path.read_text())
    pattern = {"type": "Split", "pattern": {"Regex": "(?:a|b)+[cx]"}, "behavior": "Isolated"}
    parts = [pattern | {"invert": False}, found["pre_tokenizer"]]
    found["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    path.write_text(json.dumps(found))
    return folder


class Seen:
    """Arguments that processes and threads were created with."""

    def __init__(self, changed: pytest.MonkeyPatch) -> None:
        self.limits: dict[str, Limits] = {}
        self.waiting: dict[str, int] = {}
        make_process, make_thread = Limited.__init__, CallerThread.__init__

        def process(
            one: Limited, program: Sequence[str], limits: Limits, *given: Any, **named: Any
        ) -> None:
            self.limits[named["called"]] = limits
            make_process(one, program, limits, *given, **named)

        def thread(one: CallerThread, name: str, *given: Any) -> None:
            make_thread(one, name, *given)
            self.waiting[name] = one._most

        changed.setattr(Limited, "__init__", process)
        changed.setattr(CallerThread, "__init__", thread)


async def test_a_server_gives_them_to_every_process_and_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "models")
    seen = Seen(monkeypatch)
    async with serving(tmp_path, tmp_path / "models", load_model=("chat",), **SAID):
        pass

    found = {name: (one.cpu_seconds, one.memory_bytes) for name, one in seen.limits.items()}
    assert {name: (seconds, 300 << 20) for name, seconds in KINDS.items()} == found
    assert {"tokens": 7, "text": 7, "grammars": 7} == seen.waiting


def test_a_front_end_gives_them_to_the_texts_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path)
    seen = Seen(monkeypatch)
    limits = text_limits(replace(Settings(repository=Path()), **SAID))
    info: Any = SimpleNamespace(directory=folder / "1", roots=ANYWHERE)
    texts._text("chat", info, limits).close()

    assert {"chat template": limits.template, "tokenizer": limits.tokenizer} == seen.limits
    assert {"tokens": 7} == seen.waiting
