"""Texts of generators that a front end reads again, from the files that the engine has read."""

from dataclasses import replace
from pathlib import Path

import pytest
from support import tiny_chat
from support.conditions import until
from support.core import World
from support.fronts import Joined, Noting, joined

from xlaserve.language.text import LanguageText
from xlaserve.models.generation.info import GenerationInfo
from xlaserve.models.loaded import ModelInfo


@pytest.fixture(name="folder", scope="module")
def a_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version directory with a tokenizer and a template."""
    return tiny_chat.export(tmp_path_factory.mktemp("texts") / "story") / "1"


class Speaking(Noting):
    """Says that it has a text, which only its description is asked for."""

    def __init__(self, folder: Path, slots: int = 1) -> None:
        super().__init__(1, World())
        self.info = replace(
            self.info,
            generation=GenerationInfo(
                *(32, 64, (5,), folder, slots, (64,), 8), text=LanguageText.read(folder)
            ),
        )


def shown(pair: Joined) -> GenerationInfo:
    """Return what the front end knows of the generator `m`."""
    instance = pair.ends[0].registry.version("m", "1").instance
    assert instance is not None
    info: ModelInfo = instance.info
    assert info.generation is not None
    return info.generation


async def test_the_text_of_a_front_end_is_that_of_the_engine(folder: Path) -> None:
    """It is there once the load is answered: the tokens are the same, and the template."""
    async with joined(Speaking(folder)) as pair:
        text = shown(pair).text
        assert text is not None
        assert LanguageText.read(folder).digest == text.digest
        assert tiny_chat.tokens_of("hello") == text.encode("hello")
        assert text.has_template


async def test_a_model_is_shown_behind_those_that_came_before(folder: Path) -> None:
    """Texts are read in a thread, and what is said meanwhile waits for its turn."""
    async with joined(Speaking(folder)) as pair:
        pair.side.load(Speaking(folder, 2))
        pair.side.load(Noting(1, World()))
        pair.side.load(Speaking(folder, 3))
        await pair.shown()

        assert (3, True) == (shown(pair).slots, shown(pair).text is not None)
        assert len(pair.front_ends[0]._texts._found) == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
async def test_files_that_have_changed_are_no_text(tmp_path: Path, name: str) -> None:
    """Tokens of one version for parameters of another would be nonsense, said with confidence."""
    folder = tiny_chat.export(tmp_path / "story") / "1"
    model = Speaking(folder)
    (folder / name).write_text((folder / name).read_text() + "\n")
    async with joined(model) as pair:
        found = shown(pair)
        assert found.text is None
        assert "changed since the engine has read them" in found.no_text


async def test_files_that_are_gone_are_no_text(tmp_path: Path) -> None:
    """The model is shown all the same: it takes token ids."""
    folder = tiny_chat.export(tmp_path / "story") / "1"
    model = Speaking(folder)
    (folder / "tokenizer.json").unlink()
    async with joined(model) as pair:
        assert shown(pair).text is None
        assert "tokenizer.json" in shown(pair).no_text


async def test_an_engine_that_dies_while_texts_are_read_leaves_nothing(folder: Path) -> None:
    """The next one is shown."""
    async with joined() as pair, joined(Speaking(folder)) as other:
        front = pair.front_ends[0]
        pair.side.load(Speaking(folder))
        await until(lambda: front._reading is not None or front._texts._found)
        assert front._bridge is not None
        front._bridge.close()
        assert (None, 0) == (front._reading, len(front._revisions))
        assert shown(other).text is not None


def test_a_file_that_is_missing_is_no_empty_one(tmp_path: Path) -> None:
    """Of the files, the digest sees everything."""
    folder = tiny_chat.export(tmp_path / "story") / "1"
    before = LanguageText.read(folder).digest
    (folder / "chat_template.jinja").write_text("")
    between = LanguageText.read(folder).digest
    (folder / "chat_template.jinja").write_text("x")

    assert 3 == len({before, between, LanguageText.read(folder).digest})
