"""Tokenizers and templates that front ends read from the same files as the engine."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support import tiny_chat
from support.conditions import until
from support.core import World
from support.fronts import Joined, Noting, connect, joined

from xlaserve.files.roots import ANYWHERE
from xlaserve.language.text import LanguageText
from xlaserve.language.text_limits import TextLimits
from xlaserve.language.tokenizing import Tokens
from xlaserve.runtime.embedding import text_files
from xlaserve.runtime.embedding.info import EmbeddingInfo
from xlaserve.runtime.generator.info import GenerationInfo
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.workers.fronts import texts


@pytest.fixture(name="folder", scope="module")
def a_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version directory with a tokenizer and a template."""
    return tiny_chat.export(tmp_path_factory.mktemp("texts") / "story") / "1"


class Speaking(Noting):
    """A model that only declares a text in its description."""

    def __init__(self, folder: Path, slots: int = 1) -> None:
        super().__init__(1, World())
        self.info = replace(
            self.info,
            generation=GenerationInfo(
                *(32, 64, (5,), folder, slots, (64,), 8), text=LanguageText.read(folder)
            ),
        )


def shown(pair: Joined) -> GenerationInfo:
    """Return the front end's description of the generator `m`."""
    instance = pair.ends[0].registry.version("m", "1").instance
    assert instance is not None
    info: ModelInfo = instance.info
    assert info.generation is not None
    return info.generation


async def test_the_text_of_a_front_end_is_that_of_the_engine(folder: Path) -> None:
    """Once the load is answered, tokens and template are the same."""
    async with joined(Speaking(folder)) as pair:
        text = shown(pair).text
        assert text is not None
        assert LanguageText.read(folder).digest == text.digest
        assert tiny_chat.tokens_of("hello") == text.encode("hello")
        assert text.has_template


class Held:
    """Holds back the reading of texts, and records the instances it was requested for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handles: list[int] = []
        self.may_read = threading.Event()
        read = texts._read

        def held(wanted: texts.Wanted, limits: TextLimits) -> LanguageText | Tokens | str:
            self.handles.append(wanted.handle)
            assert self.may_read.wait(60)
            return read(wanted, limits)

        monkeypatch.setattr(texts, "_read", held)


async def test_a_model_is_shown_behind_those_that_came_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are read in a thread, each once; later messages wait for their turn."""
    held = Held(monkeypatch)
    async with joined() as pair:
        pair.side.load(Speaking(folder))
        await until(lambda: held.handles)
        for model in (Speaking(folder, 2), Noting(1, World()), Speaking(folder, 3)):
            pair.side.load(model)
            pair.fronts.mirror._publish()
        await until(lambda: len(pair.front_ends[0]._revisions) == 4)
        assert pair.ends[0].registry.version("m", "1").instance is None
        held.may_read.set()
        await pair.shown()

        assert (3, True) == (shown(pair).slots, shown(pair).text is not None)
        assert len(held.handles) == len(set(held.handles)) == 3
        assert len(pair.front_ends[0]._texts._found) == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
async def test_files_that_have_changed_are_no_text(tmp_path: Path, name: str) -> None:
    """Token ids of one version would be meaningless for the parameters of another."""
    folder = tiny_chat.export(tmp_path / "story") / "1"
    model = Speaking(folder)
    (folder / name).write_text((folder / name).read_text() + "\n")
    async with joined(model) as pair:
        found = shown(pair)
        assert found.text is None
        assert "its files changed since the engine read them" in found.no_text


async def test_files_that_are_gone_are_no_text(tmp_path: Path) -> None:
    """The model is still shown: it takes token ids."""
    folder = tiny_chat.export(tmp_path / "story") / "1"
    model = Speaking(folder)
    (folder / "tokenizer.json").unlink()
    async with joined(model) as pair:
        assert shown(pair).text is None
        assert "tokenizer.json" in shown(pair).no_text


async def test_an_engine_that_dies_while_texts_are_read_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of the next engine are shown without waiting for the first one's texts."""
    held = Held(monkeypatch)
    async with joined() as pair, joined(Noting(1, World())) as other:
        front = pair.front_ends[0]
        pair.side.load(Speaking(folder))
        await until(lambda: held.handles)
        reading, bridge = front._reading, front._bridge
        assert reading is not None
        assert bridge is not None
        bridge.close()
        await until(reading.done)
        await connect(other.fronts, front)
        instance = pair.ends[0].registry.version("m", "1").instance
        assert instance is not None
        assert instance.info.generation is None
        held.may_read.set()


def test_a_file_that_is_missing_is_no_empty_one(tmp_path: Path) -> None:
    """The digest of the files distinguishes them."""
    folder = tiny_chat.export(tmp_path / "story") / "1"
    before = LanguageText.read(folder).digest
    (folder / "chat_template.jinja").write_text("")
    between = LanguageText.read(folder).digest
    (folder / "chat_template.jinja").write_text("x")

    assert 3 == len({before, between, LanguageText.read(folder).digest})


class Embedding(Noting):
    """A model that only declares text embeddings in its description."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1, World())
        text = text_files.read(folder, "m", ANYWHERE)
        spec, output = self.info.inputs[0], self.info.outputs[0]
        embedding = EmbeddingInfo(
            *(spec, None, None, output, (4,), 4), text=text.tokens, files=text.files
        )
        self.info = replace(self.info, embedding=embedding)


def shown_embedding(pair: Joined) -> EmbeddingInfo:
    """Return the front end's description of the embeddings of `m`."""
    instance = pair.ends[0].registry.version("m", "1").instance
    assert instance is not None
    embedding: EmbeddingInfo | None = instance.info.embedding
    assert embedding is not None
    return embedding


async def test_the_tokenizer_of_a_front_end_is_that_of_the_engine(folder: Path) -> None:
    """For embeddings of texts."""
    async with joined(Embedding(folder)) as pair:
        text = shown_embedding(pair).text
        assert text is not None
        assert tiny_chat.tokens_of("hello") == text.encode("hello")
        assert 4 == shown_embedding(pair).max_tokens


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (" ", "its files changed since the engine read them"),
        ("{", "is not valid JSON"),
        (None, "changed"),
    ],
)
async def test_a_tokenizer_that_has_changed_is_no_text(
    tmp_path: Path, damage: str | None, reason: str
) -> None:
    """The model takes token ids only, and the error says why."""
    folder = tiny_chat.export(tmp_path / "story") / "1"
    model, file = Embedding(folder), folder / "tokenizer.json"
    if damage is None:
        file.unlink()
    else:
        file.write_text(file.read_text() + damage)
    async with joined(model) as pair:
        found = shown_embedding(pair)
        assert found.text is None
        assert reason in found.no_text
