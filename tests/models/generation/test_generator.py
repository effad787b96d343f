"""Generators: export, load, and generation in slots."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support import tiny_language
from support.generators import CHUNK, CONFIG, SLOTS, Asking, Loaded, load, prompt_of
from support.tiny_language import LENGTH, STOP, VOCAB, greedy

from xlaserve.artifact import generator_record as record
from xlaserve.artifact.sizes import EXECUTABLE_BYTES
from xlaserve.errors import InvalidModel, InvalidParameter, InvalidTensor
from xlaserve.errors.code import ModelFailed
from xlaserve.generation import sampling
from xlaserve.generation.in_place import Memory, check_aliasing
from xlaserve.generation.loading import GeneratorModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import read_config
from xlaserve.runtime import loaders
from xlaserve.runtime.generator.info import mask_words
from xlaserve.runtime.load_context import LoadContext

SAMPLED = {"temperature": 1.5, "ignore_eos": True, "max_tokens": 12}
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_language.export(tmp_path_factory.mktemp("models") / "story" / "1")


@pytest.fixture(scope="module")
def model(directory: Path) -> Iterator[GeneratorModel]:
    loaded = load(directory)
    yield loaded
    loaded.close()


@pytest.fixture
def loaded(model: GeneratorModel) -> Iterator[Loaded]:
    """Checks that every request returns its slot, however it ends."""
    found = Loaded(model)
    yield found
    found.wait_until_idle()


@pytest.mark.parametrize("length", [1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 15, 17, 33, LENGTH - 3])
def test_greedy_tokens_are_those_of_the_model_without_a_cache(loaded: Loaded, length: int) -> None:
    """Across the bounds of chunks and windows, and up to the last position."""
    prompt = prompt_of(length, length)
    count = min(6, LENGTH - length + 1)

    request = loaded.ask(prompt, max_tokens=count)

    assert greedy(prompt, count) == request.tokens


def test_a_request_ends_with_the_last_position(loaded: Loaded) -> None:
    """The token at the last position is generated, and no row of another slot is overwritten."""
    request = loaded.ask(prompt_of(LENGTH - 2), ignore_eos=True)
    full = loaded.ask(prompt_of(LENGTH), ignore_eos=True)

    assert (3, 1) == (len(request.tokens), len(full.tokens))
    assert "length" == request.told["finish_reason"]
    assert LENGTH - 2 == request.told["prompt_tokens"]


def test_more_requests_than_slots_give_what_each_gives_alone(loaded: Loaded) -> None:
    prompts = [prompt_of(3 + 5 * index, index) for index in range(8)]

    asked = [loaded.ask(prompt, max_tokens=8) for prompt in prompts]

    assert [greedy(prompt, 8) for prompt in prompts] == [request.tokens for request in asked]


def test_the_first_position_behind_a_window_takes_the_next_one(loaded: Loaded) -> None:
    """In a window that ends before the position, attention would miss its own row."""
    prompts = [prompt_of(17, index) for index in range(24)]

    asked = [loaded.ask(prompt, max_tokens=1) for prompt in prompts]

    assert [greedy(prompt, 1) for prompt in prompts] == [request.tokens for request in asked]


def test_limits_of_a_neighbour_leave_a_row_as_it_is() -> None:
    """The probabilities of its likeliest tokens may round to 1, yet later tokens can be drawn."""
    with jax.enable_x64(False):  # as in an export
        logits = jnp.asarray([[100.0, 0.0, 1.0], [100.0, 0.0, 1.0]])
        ones, none = jnp.ones((2, 1)), jnp.zeros((2, 1))

        found = sampling._likely(
            logits, jnp.zeros((2, 1), jnp.int32), ones, none, jnp.array([[True], [False]])
        )

    assert [[100.0, float("-inf"), float("-inf")], [100.0, 0.0, 1.0]] == found.tolist()


def test_a_seed_gives_the_same_tokens_beside_any_neighbour(loaded: Loaded) -> None:
    """Also with neighbors that have limits: those are computed for all rows."""
    prompts = [prompt_of(4 + index, index) for index in range(6)]
    alone = [loaded.ask(p, seed=i, **SAMPLED).tokens for i, p in enumerate(prompts)]
    loaded.wait_until_idle()

    limited = {"temperature": 2.0, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.3}
    beside = [loaded.ask(prompt_of(9), **limited, ignore_eos=True, max_tokens=40)]
    together = [loaded.ask(p, seed=i, **SAMPLED) for i, p in enumerate(prompts)]

    assert alone == [request.tokens for request in together]
    assert 40 == len(beside[0].tokens)


@pytest.mark.slow
def test_seeds_of_more_than_32_bits_differ(loaded: Loaded) -> None:
    prompt = prompt_of(5)
    seeds = [1, 1 + (1 << 32), 1 << 31]

    found = [tuple(loaded.ask(prompt, seed=seed, **SAMPLED).tokens) for seed in seeds]

    assert len(seeds) == len(set(found))


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_the_narrowest_limit_leaves_the_likeliest_token(
    loaded: Loaded, limit: dict[str, Any]
) -> None:
    prompt = prompt_of(6)

    request = loaded.ask(prompt, temperature=5.0, max_tokens=6, **limit)

    assert greedy(prompt, 6) == request.tokens


def test_top_k_draws_from_as_many_tokens(loaded: Loaded) -> None:
    """Each of them is drawn if the temperature makes them equally likely."""
    asked = [
        loaded.ask([9, 8], temperature=100.0, top_k=2, max_tokens=1, seed=seed, logprobs=2)
        for seed in range(24)
    ]
    found = {request.tokens[0] for request in asked}

    assert set(map(int, asked[0].answers[0]["top_tokens"])) == found


def test_a_bias_chooses_the_token_and_a_stop_ends_it(loaded: Loaded) -> None:
    request = loaded.ask([9, 8], logit_bias="11:100, 3:-100", stop_token_ids="11")

    assert [11] == request.tokens
    assert ("stop", True) == (request.told["finish_reason"], request.told["stop_token"])


def test_a_frequency_penalty_counts_what_was_given(loaded: Loaded) -> None:
    """The larger bias wins until the penalties exceed it."""
    biased: dict[str, Any] = {"logit_bias": "11:100,12:20", "max_tokens": 3, "ignore_eos": True}

    free = loaded.ask([9, 8], **biased)
    counted = loaded.ask([9, 8], frequency_penalty=50.0, **biased)
    present = loaded.ask([9, 8], presence_penalty=100.0, **biased)

    assert [11, 11, 11] == free.tokens
    assert [11, 11, 12] == counted.tokens
    assert [11, 12] == present.tokens[:2]


def test_a_penalty_for_repetition_is_of_the_prompt_too(loaded: Loaded) -> None:
    """Tokens of the prompt lose to unseen tokens, despite their larger logits."""
    prompt = prompt_of(5)
    (likeliest,) = loaded.ask(prompt, max_tokens=1).tokens

    found = loaded.ask(
        [likeliest, *prompt], repetition_penalty=100.0, max_tokens=6, ignore_eos=True
    )

    assert not {likeliest, *prompt} & set(found.tokens)
    assert 6 == len(set(found.tokens))


def test_fewer_tokens_than_asked_for_do_not_stop(loaded: Loaded) -> None:
    """The stop token is the likeliest from the start, but must not be drawn earlier."""
    biased = {"logit_bias": f"{STOP}:100", "max_tokens": 9}

    assert [STOP] == loaded.ask([9, 8], **biased).tokens
    found = loaded.ask([9, 8], min_tokens=3, **biased).tokens

    assert 4 == len(found)
    assert (STOP, 0) == (found[3], found[:3].count(STOP))


def test_the_likeliest_tokens_are_told_where_they_are_asked_for(loaded: Loaded) -> None:
    request, without = (
        loaded.ask([9, 8], logprobs=3, max_tokens=2),
        loaded.ask([9, 8], max_tokens=1),
    )

    assert request.tokens == [int(found["top_tokens"][0]) for found in request.answers]
    for found in request.answers:
        assert found["logprob"][0] == found["top_logprobs"][0]
        assert (3, 3) == (len(found["top_tokens"]), len(found["top_logprobs"]))
    assert without.tokens
    assert 0 == len(without.answers[0]["top_tokens"])


def test_a_cancelled_request_leaves_its_slot(loaded: Loaded) -> None:
    """Within one step, so that queued requests are answered although its client never reads."""
    endless = [loaded.begin(Asking(prompt_of(4, index), ENDLESS, 1)) for index in range(SLOTS)]
    for request in endless:
        assert request.some.wait(60)
        request.is_cancelled = True
    last = loaded.ask(prompt_of(5), max_tokens=3)

    assert greedy(prompt_of(5), 3) == last.tokens


def test_a_cancelled_request_that_waits_leaves_at_once(loaded: Loaded) -> None:
    """Although no slot is released and the thread sleeps, because no client reads."""
    held = [loaded.begin(Asking(prompt_of(4, index), ENDLESS, 1)) for index in range(SLOTS)]
    for request in held:
        assert request.paused.wait(60)
    waiting = loaded.ask(prompt_of(5))
    waiting.cancel()

    assert waiting.over.wait(60)
    assert waiting.has_ended
    assert not any(request.over.is_set() for request in held)
    for request in held:
        request.is_cancelled = True
        request.read_on()


def test_a_client_that_does_not_read_holds_up_itself_alone(loaded: Loaded) -> None:
    prompt = prompt_of(4)
    slow = Asking(prompt, {"max_tokens": 5})
    slow.is_writable = False
    loaded.model.handle(0, [slow], lambda: None)
    assert slow.some.wait(60)

    others = [loaded.ask(prompt_of(6, index), max_tokens=9) for index in range(4)]

    assert [greedy(prompt_of(6, i), 9) for i in range(4)] == [one.tokens for one in others]
    assert 1 == len(slow.answers)
    slow.read_on()
    assert greedy(prompt, 5) == slow.tokens


def test_a_step_that_fails_fails_its_requests_alone(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donated cache may be lost too: later requests start with a zeroed cache."""
    programs: Any = loaded.model._programs
    assert greedy(prompt_of(20), 4) == loaded.ask(prompt_of(20), max_tokens=4).tokens
    with monkeypatch.context() as patch:

        def failing(*arguments: object, **slots: object) -> None:
            for array in programs._cache:
                array.delete()
            raise ValueError("the device is on fire")

        patch.setattr(programs, "step", failing)
        with pytest.raises(ModelFailed, match="'story': a step failed: the device is on fire"):
            _ = loaded.ask(prompt_of(3)).tokens

    again = loaded.ask(prompt_of(20), max_tokens=4)
    assert (greedy(prompt_of(20), 4), 0) == (again.tokens, again.told["cached_tokens"])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([], "expected 1 to 64 tokens (the model's positions), got 0"),
        ([1] * (LENGTH + 1), "expected 1 to 64 tokens (the model's positions), got 65"),
        ([1, VOCAB], "expected token ids of 0 to 31, got 32"),
        ([-1], "expected token ids of 0 to 31, got -1"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(
    loaded: Loaded, prompt: list[int], expected: str
) -> None:
    with pytest.raises(
        InvalidTensor, match=re.escape(f"model 'story', input 'tokens': {expected}")
    ):
        _ = loaded.ask(prompt).tokens


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 0, "an integer of 1"),
        ("max_tokens", True, "an integer of 1"),
        ("temperature", float("nan"), "a number of 0 to 100"),
        ("temperature", "1", "a number of 0 to 100"),
        ("top_p", 0.0, "more than 0, at most 1"),
        ("repetition_penalty", 0, "more than 0"),
        ("seed", 1 << 63, "an integer of 0"),
        ("logprobs", 21, "an integer of 0 to 20"),
        ("ignore_eos", 1, "true or false"),
        ("stop_token_ids", "4,x", "token ids of 0 to 31"),
        ("stop_token_ids", "9" * 5000, "token ids of 0 to 31"),
        ("stop_token_ids", "1," * 1025, "at most 1024 entries"),
        ("logit_bias", "3", "id:bias"),
        ("logit_bias", "3:nan", "id:bias"),
        ("logit_bias", "32:1", "token ids of 0 to 31"),
    ],
)
def test_a_parameter_that_none_can_have_is_refused(
    loaded: Loaded, name: str, value: Any, expected: str
) -> None:
    with pytest.raises(InvalidParameter, match=f"parameter '{name}': expected {expected}"):
        _ = loaded.ask([1], **{name: value}).tokens


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"slots": "0"}, "parameter 'slots': expected 1 to 1024, got '0'"),
        ({"length": "65"}, "parameter 'length': expected 2 to 64, got '65'"),
        (
            {"windows": "16,65"},
            "parameter 'windows': expected up to 8 comma-separated numbers from 1 to 64",
        ),
        ({"windows": "x"}, "parameter 'windows'"),
        ({"chunk": "17"}, "parameter 'chunk': expected 1 to 16, got '17'"),
        ({"prefix_cache": "yes"}, "parameter 'prefix_cache': expected true or false, got 'yes'"),
    ],
)
def test_sizes_that_it_cannot_have_are_refused(
    directory: Path, changed: dict[str, str], expected: str
) -> None:
    with pytest.raises(InvalidModel, match=expected):
        load(directory, **changed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sequence_batching { }", "sequence_batching: not available for generators"),
        ("max_batch_size: 4", "max_batch_size"),
        ('input { name: "text" data_type: TYPE_STRING dims: [-1] }', "'text'"),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    directory: Path, tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "config.pbtxt").write_text(text)
    context = LoadContext("story", "1", read_config(tmp_path))
    with pytest.raises(InvalidModel, match=expected):
        loaders.load(directory, context)


def test_its_memory_is_predicted_and_said(directory: Path, model: GeneratorModel) -> None:
    """The memory of the slots follows from the configuration, before anything is compiled."""
    memory = model.info.memory
    config = ModelConfig(parameters=CONFIG)
    twice = ModelConfig(parameters=CONFIG | {"slots": str(2 * SLOTS)})
    cache = tiny_language.LAYERS * 2 * SLOTS * tiny_language.SIZE * LENGTH * 4
    tables = SLOTS * (VOCAB * 9 + mask_words(VOCAB) * 4)
    tokens = SLOTS * LENGTH * 4

    assert cache + tables == memory.states_bytes
    assert memory.total_bytes <= loaders.predict_size(directory, config)["cpu:0"]
    predicted = [loaders.predict_size(directory, one)["cpu:0"] for one in (config, twice)]
    assert memory.states_bytes + tokens == predicted[1] - predicted[0]
    assert memory.executables_bytes % EXECUTABLE_BYTES == tokens
    kept_none = ModelConfig(parameters=CONFIG | {"prefix_cache": "false"})
    assert predicted[0] - tokens == loaders.predict_size(directory, kept_none)["cpu:0"]


def test_a_ring_that_is_shorter_than_the_length_is_refused(tmp_path: Path) -> None:
    """A ring of full length is accepted; the directory of a refused export is removed."""

    def ring(params: Any, slots: int, length: int) -> Any:
        return tiny_language.init_cache(params, slots, min(length, 48))

    with pytest.raises(InvalidModel, match=r"max_length of 64, got \[2, 2, 48, 8\]: ring-buffer"):
        tiny_language.export(tmp_path / "ring" / "1", init_cache=ring)
    assert not (tmp_path / "ring").exists()
    tiny_language.export(tmp_path / "whole" / "1", init_cache=ring, max_length=48)


@pytest.mark.slow
def test_a_cache_that_is_copied_is_refused(tmp_path: Path) -> None:
    """This model is copied because each step moves every row."""

    def moving(params: Any, cache: Any, *arguments: Any) -> Any:
        logits, cache = tiny_language.decode(params, cache, *arguments)
        return logits, jax.tree.map(lambda array: array[:, :, ::-1], cache)

    path = tiny_language.export(tmp_path / "moving" / "1", decode=moving, max_length=1 << 14)

    with pytest.raises(InvalidModel, match="decode.jaxexp copies the cache"):
        load(path, slots="4", windows="16", chunk="4")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (Memory(aliased=(8 << 20) - 1, temporaries=0), "does not update the cache in place"),
        (Memory(aliased=8 << 20, temporaries=(8 << 20) + 1), "copies the cache"),
    ],
)
def test_a_program_has_to_change_the_cache_in_place(memory: Memory, expected: str) -> None:
    check_aliasing("decode", Memory(8 << 20, 8 << 20), 8 << 20, 100)
    with pytest.raises(InvalidModel, match=expected):
        check_aliasing("decode", memory, 8 << 20, 100)


def _changed(directory: Path, tmp_path: Path, **fields: Any) -> Path:
    path = tmp_path / "story" / "1"
    path.mkdir(parents=True)
    for file in directory.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    document = json.loads((path / record.FILE_NAME).read_text()) | fields
    (path / record.FILE_NAME).write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"format_version": 2}, "format version 2"),
        ({"kind": "other"}, "of kind 'other'"),
        ({"vocab": 0}, "vocab is not"),
        ({"stop_tokens": [VOCAB]}, "a stop token is outside the vocabulary"),
        ({"cache": []}, "the cache does not have 1 to"),
        (
            {"cache": [{"dtype": "float32", "shape": [2, -1]}]},
            "a cache array does not have slots as its first axis",
        ),
        ({"cache": [{"dtype": "float32", "shape": [-1, 0]}]}, "a cache array has an invalid shape"),
        ({"donated": {}}, "it donates arguments other than the cache and the counts"),
        ({"files": {}}, "it does not list the files of a generator"),
        ({"odd": 1}, "not valid"),
        ({"parameters": ["odd"]}, "parameter 'embedding' is not in both"),
    ],
)
def test_a_changed_description_is_refused(
    directory: Path, tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InvalidModel, match=expected):
        load(_changed(directory, tmp_path, **fields))


def test_a_changed_program_is_refused(directory: Path, tmp_path: Path) -> None:
    path = _changed(directory, tmp_path)
    data = bytearray((path / record.DECODE).read_bytes())
    data[len(data) // 2] ^= 1
    (path / record.DECODE).write_bytes(data)

    with pytest.raises(InvalidModel, match="decode.jaxexp changed after the export"):
        load(path)


@pytest.mark.parametrize("name", ["../up", "generator.json", ".hidden", ""])
def test_a_file_that_would_not_lie_beside_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidModel, match="files: expected a plain file name"):
        tiny_language.export(tmp_path / "m" / "1", files={name: tmp_path})


def test_files_of_its_tokenizer_are_copied(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("{}")

    path = tiny_language.export(tmp_path / "m" / "1", files={"tokenizer.json": tmp_path / "t.json"})

    assert "{}" == (path / "tokenizer.json").read_text()
    assert "tokenizer.json" in record.read(path).files
    with pytest.raises(FileExistsError):
        tiny_language.export(path)
