"""Answers constrained by a grammar, next to unconstrained ones."""

# pyright: reportPrivateUsage=false

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_language
from support.generators import CONFIG, SLOTS, Asking, Loaded, load, load_configured, prompt_of
from support.hard_grammars import HARD
from support.tiny_language import STOP, VOCAB, greedy

from xlaserve.errors import InvalidModel, InvalidParameter
from xlaserve.generation import asking
from xlaserve.generation.loading import GeneratorModel
from xlaserve.language import grammars
from xlaserve.language.grammars import Grammars
from xlaserve.model_config.config import DynamicBatching, ModelConfig
from xlaserve.runtime.generator import configured

ALPHABET = [*"abcde", "<eos>", *'{}":,', *"0123456789", *"fghij", "x", "y", "a1", "tr", '":', "Ġ"]
"""Tokens by id: some have two characters, and cross a step of the grammar."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
HOT: dict[str, Any] = {"temperature": 5.0, "max_tokens": 40}


def tokenizer() -> str:
    """Return a byte-level tokenizer.json."""
    vocab = {text: index for index, text in enumerate(ALPHABET)}
    level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    eos = {"id": STOP, "content": "<eos>", "special": True, "normalized": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [eos | flags],
            "pre_tokenizer": {"type": "ByteLevel"} | level,
            "decoder": {"type": "ByteLevel"} | level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
    )


def text_of(tokens: list[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens if token != STOP)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "tokenizer.json").write_text(tokenizer())
    return tiny_language.export(
        folder / "story" / "1", files={"tokenizer.json": folder / "tokenizer.json"}
    )


@pytest.fixture(scope="module")
def model(directory: Path) -> Iterator[GeneratorModel]:
    levels = DynamicBatching(priority_levels=2, default_priority_level=2)
    config = ModelConfig(parameters=CONFIG | {"grammars": "true"}, dynamic_batching=levels)
    loaded = load_configured(directory, config)
    yield loaded
    loaded.close()


@pytest.fixture
def loaded(model: GeneratorModel) -> Iterator[Loaded]:
    """Checks that every request returns its slot, however it ends."""
    found = Loaded(model)
    yield found
    found.wait_until_idle()


@pytest.mark.parametrize("seed", range(8))
def test_an_answer_is_json_of_its_schema(loaded: Loaded, seed: int) -> None:
    request = loaded.ask(prompt_of(4), json_schema=json.dumps(SCHEMA), seed=seed, **HOT)

    found = json.loads(text_of(request.tokens))

    assert {"a", "b"} == set(found)
    assert 0 <= found["a"] <= 99
    assert "x" == found["b"]
    assert "stop" == request.told["finish_reason"]


def test_an_answer_ends_where_nothing_may_follow(loaded: Loaded) -> None:
    """No stop token is needed: the grammar permits no continuation."""
    request = loaded.ask(prompt_of(4), regex="[ab]{3}c", seed=1, **HOT)

    assert re.fullmatch("[ab]{3}c", text_of(request.tokens))
    assert STOP not in request.tokens
    assert ("stop", None) == (request.told["finish_reason"], request.told.get("stop_token"))


def test_an_answer_may_stop_where_the_grammar_may(loaded: Loaded) -> None:
    request = loaded.ask(prompt_of(4), regex="ab*", logit_bias=f"{STOP}:100", seed=1, **HOT)

    assert [0, STOP] == request.tokens
    assert request.told["stop_token"] is True


def test_a_grammar_of_lark_is_followed(loaded: Loaded) -> None:
    request = loaded.ask(prompt_of(4), grammar='start: "{" DIGITS "}"\nDIGITS: /[0-9]{2}/', **HOT)

    assert re.fullmatch(r"\{[0-9]{2}\}", text_of(request.tokens))


def test_neighbours_are_given_what_they_get_alone(loaded: Loaded) -> None:
    """So do requests that later use the same slot."""
    schema = json.dumps(SCHEMA)
    prompts = [prompt_of(3 + index, index) for index in range(6)]

    asked: list[tuple[Asking, Asking]] = [
        (loaded.ask(prompt_of(9), json_schema=schema, **HOT), loaded.ask(p, max_tokens=8))
        for p in prompts
    ]

    assert [greedy(prompt, 8) for prompt in prompts] == [free.tokens for _, free in asked]
    for constrained, _ in asked:
        assert json.loads(text_of(constrained.tokens))["b"] == "x"


def test_the_same_seed_gives_the_same_answer_beside_others(loaded: Loaded) -> None:
    asked: dict[str, Any] = {"regex": "[a-j]{9}", "seed": 3, **HOT}
    alone = loaded.ask(prompt_of(4), **asked).tokens
    others = [loaded.ask(prompt_of(6, i), regex="[0-9]{20}", **HOT) for i in range(4)]

    assert alone == loaded.ask(prompt_of(4), **asked).tokens
    for other in others:
        assert re.fullmatch("[0-9]{20}", text_of(other.tokens))


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"regex": "[a"}, "'regex': expected a grammar that can be compiled and followed (model '"),
        ({"json_schema": "{"}, "parameter 'json_schema': expected a grammar that can be compiled"),
        ({"json_schema": '{"type":"nothing"}'}, "nothing"),
        ({"json_schema": '{"$ref":"#"}'}, "got one that no text satisfies, such as a schema whose"),
        ({"json_schema": '{"$ref":"http://127.0.0.1:1/x"}'}, "does not fetch"),
        ({"grammar": "start: missing"}, "parameter 'grammar'"),
        ({"regex": "a", "grammar": "b"}, "expected none beside 'regex'"),
        ({"regex": "a", "min_tokens": 2}, "'min_tokens': expected none beside 'regex', got 2"),
        ({"regex": "a", "ignore_eos": True}, "'ignore_eos': expected none beside 'regex'"),
        ({"regex": "a" * (asking.MOST_GRAMMAR_CHARACTERS + 1)}, "at most 65536 characters"),
        ({"regex": 3}, "at most 65536 characters, got 3"),
        ({"json_schema": '{"a":' * 5000 + "1" + "}" * 5000}, "recursion limit"),
        ({"regex": "(((a{100}){100}){100}){100}"}, "parameter 'regex'"),
        ({"regex": "é"}, "parameter 'regex'"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    loaded: Loaded, parameters: dict[str, Any], error: str
) -> None:
    """Immediately or at the failing step; its neighbor continues."""
    neighbour = loaded.ask(prompt_of(5), max_tokens=6)
    refused = loaded.ask(prompt_of(4), **parameters)

    with pytest.raises(InvalidParameter, match=re.escape(error)):
        print(text_of(refused.tokens))

    assert greedy(prompt_of(5), 6) == neighbour.tokens


def test_a_grammar_that_takes_too_much_is_ended_and_others_go_on(loaded: Loaded) -> None:
    parameter, text = HARD["multiples together"](0)
    assert loaded.ask(prompt_of(4), regex="d{3}", seed=1, **HOT).tokens
    trial = loaded.model._constraining._grammars._trial  # type: ignore[union-attr]
    process = trial._process._process
    neighbour = loaded.ask(prompt_of(5), max_tokens=6)
    refused = loaded.ask(prompt_of(4), **{parameter: text})
    behind = loaded.ask(prompt_of(4), regex="[ab]{3}c", seed=1, **HOT)

    with pytest.raises(InvalidParameter) as told:
        print(refused.tokens)

    assert str(told.value).startswith(
        f"parameter '{parameter}': expected a grammar that compiles within 0.05 CPU seconds"
        " and 536870912 bytes of memory (model 'story'): use smaller numbers"
    )
    assert greedy(prompt_of(5), 6) == neighbour.tokens
    assert re.fullmatch("[ab]{3}c", text_of(behind.tokens))
    # The forked process has exited, and another has replaced it immediately.
    assert process is trial._process._process


def test_what_was_tried_is_remembered(loaded: Loaded) -> None:
    """Both successes and failures are cached."""
    good, bad, hard = ("regex", "[cd]{2}"), ("regex", "[cd"), HARD["multiples together"](77)
    asked: list[Mapping[str, str]] = []
    trial = loaded.model._constraining._grammars._trial  # type: ignore[union-attr]
    ask = trial._process.ask

    def counted(message: Mapping[str, str]) -> Mapping[str, Any]:
        asked.append(message)
        return ask(message)

    trial._process.ask = counted  # type: ignore[method-assign]
    told = []
    try:
        for _ in range(3):
            for one in (good, bad, hard):
                request = loaded.ask(prompt_of(4), seed=1, **HOT, **dict([one]))
                assert request.over.wait(60)
                told.append(str(request.error))
    finally:
        trial._process.ask = ask  # type: ignore[method-assign]

    assert [
        dict(zip(("parameter", "text"), one, strict=True)) for one in (good, bad, hard)
    ] == asked
    assert told == told[:3] * 3
    assert ("None", True, True) == (told[0], "got" in told[1], "compiles within" in told[2])


def test_no_more_is_remembered_than_the_newest(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MOST_KNOWN", 2)
    for text in ("a{3}", "a{4}", "a{3}", "a{5}"):
        assert loaded.ask(prompt_of(4), regex=text, seed=1, **HOT).tokens

    trial = loaded.model._constraining._grammars._trial  # type: ignore[union-attr]
    digests = [hashlib.sha256(f"regex\n{text}".encode()).digest() for text in ("a{3}", "a{5}")]
    assert digests == list(trial._known)[-2:]


def test_a_process_that_tries_grammars_is_started_again(loaded: Loaded) -> None:
    assert loaded.ask(prompt_of(4), regex="b{3}", seed=1, **HOT).tokens
    trial = loaded.model._constraining._grammars._trial  # type: ignore[union-attr]
    limited = trial._process._process
    assert limited is not None
    limited._process.kill()
    limited._process.wait()

    assert re.fullmatch("b{4}", text_of(loaded.ask(prompt_of(4), regex="b{4}", **HOT).tokens))


def test_steps_that_take_long_end_their_answer(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is so low that every step exceeds it; the limit on the average is off."""
    monkeypatch.setattr(grammars, "_STEP_NS", 0)
    monkeypatch.setattr(grammars, "_MOST_STEPS_NS", 0)
    neighbour = loaded.ask(prompt_of(5), max_tokens=6)
    refused = loaded.ask(prompt_of(4), regex="[ab]{30}", **HOT)

    with pytest.raises(
        InvalidParameter, match="'regex': expected a grammar whose steps take at most"
    ):
        print(refused.tokens)

    assert greedy(prompt_of(5), 6) == neighbour.tokens


@pytest.mark.parametrize("multiple", ["0.01", "7", "1e3", "97", "9.99"])
def test_ordinary_multiples_are_followed(loaded: Loaded, multiple: str) -> None:
    schema = f'{{"type":"number","multipleOf":{multiple},"minimum":0,"maximum":0}}'

    assert float(text_of(loaded.ask(prompt_of(4), json_schema=schema, **HOT).tokens)) == 0


def test_a_cancelled_request_is_not_compiled(loaded: Loaded) -> None:
    request = Asking(prompt_of(4), {"regex": "[wrong"})
    request.is_cancelled = True

    over = Loaded(loaded.model)
    over.model.handle(0, [request], lambda: None)

    assert [] == request.tokens


@pytest.mark.slow
def test_a_model_without_the_parameter_says_so(directory: Path) -> None:
    model = load(directory)
    request = Loaded(model).ask(prompt_of(4), regex="a")
    try:
        with pytest.raises(InvalidParameter, match="lacks the parameter 'grammars'"):
            print(request.tokens)
    finally:
        model.close()


@pytest.mark.slow
def test_a_model_that_is_closed_fails_what_it_compiles(directory: Path) -> None:
    model = load(directory, grammars="true")
    loaded = Loaded(model)
    requests = [loaded.ask(prompt_of(4), regex="[ab]{9}", max_tokens=50) for _ in range(20)]
    model.close()

    ended = [request.over.wait(60) for request in requests]
    late = loaded.ask(prompt_of(4), regex="a")

    assert all(ended)
    assert late.over.wait(60)
    assert "unloaded" in str(late.error)


@pytest.mark.slow
def test_memory_of_grammars_is_counted(directory: Path, model: GeneratorModel) -> None:
    plain = load(directory)
    plain.close()

    config = ModelConfig(parameters=CONFIG)
    asking_for_it = ModelConfig(parameters=CONFIG | {"grammars": "true"})
    predicted = [configured.predict_slots(directory, one) for one in (config, asking_for_it)]

    more = model.info.memory.total_bytes - plain.info.memory.total_bytes

    assert VOCAB * configured.GRAMMAR_BYTES == more == predicted[1] - predicted[0]


@pytest.mark.parametrize("written", ["yes", "1", ""])
def test_the_parameter_is_true_or_false(directory: Path, written: str) -> None:
    with pytest.raises(InvalidModel, match="'grammars': expected true or false"):
        load(directory, grammars=written)


@pytest.mark.slow
def test_memory_of_a_tokenizer_is_counted(directory: Path) -> None:
    """It is predicted before the load, unless the configuration disables text."""
    configs = [ModelConfig(parameters=CONFIG | {"text": wanted}) for wanted in ("false", "true")]
    predicted = [configured.predict_slots(directory, config) for config in configs]
    found = []
    for config in configs:
        model = load_configured(directory, config)
        found.append(model.info.memory.total_bytes)
        model.close()

    expected = VOCAB * configured.TOKENIZER_BYTES
    assert expected == found[1] - found[0] == predicted[1] - predicted[0]


def test_a_model_needs_a_tokenizer(tmp_path: Path) -> None:
    directory = tiny_language.export(tmp_path / "story" / "1")

    with pytest.raises(InvalidModel, match=r"expected a tokenizer\.json in the version, got none"):
        load(directory, grammars="true")


@pytest.mark.parametrize(
    ("text", "vocab", "error"),
    [
        ("{}", VOCAB, "Model missing"),
        (tokenizer(), VOCAB - 1, "vocab size too small"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(text: str, vocab: int, error: str) -> None:
    with pytest.raises(InvalidModel, match=error):
        Grammars("story", text, vocab, [STOP])


def test_a_grammar_needs_an_end() -> None:
    with pytest.raises(InvalidModel, match="needs stop tokens"):
        Grammars("story", tokenizer(), VOCAB, [])


def test_tokens_beyond_the_tokenizer_are_never_allowed() -> None:
    """Vocabularies are often padded with rows that have no token."""
    words = np.full(2, -1, np.int32)

    Grammars("story", tokenizer(), 64, [STOP]).compile("regex", "a*").fill(words)

    allowed = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
    assert [0, STOP] == allowed.tolist()


assert len(ALPHABET) == VOCAB


def test_grammar_stop_string_and_log_probabilities_go_on_behind_a_preemption(
    loaded: Loaded,
) -> None:
    """Two requests lose their slots in the middle of a number and of a stop string.

    A chunk recomputes their rows instead of single steps: log-probabilities may differ a bit.
    """
    plain: dict[str, Any] = {"temperature": 2.0, "max_tokens": 12, "ignore_eos": True, "seed": 3}
    prompts = [prompt_of(6 + index, 40 + index) for index in range(SLOTS)]
    written = text_of(loaded.ask(prompts[1], **plain).tokens)
    reads = 4
    stop = written[reads - 1 : reads + 2]
    asked: list[dict[str, Any]] = [
        {"regex": "[0-9]{9}x", "seed": 5, **HOT},
        {"stop": stop, **plain},
        {"logprobs": 3, **plain},
    ]
    whole = [loaded.ask(prompt, **one) for prompt, one in zip(prompts, asked, strict=True)]
    assert all(len(request.tokens) > reads for request in whole)
    loaded.wait_until_idle()
    before = loaded.model.counts.preemptions
    slow = [Asking(*pair, reads) for pair in zip(prompts, asked, strict=True)]
    for request in slow:
        loaded.model.handle(0, [request], lambda: None)
    for request in slow:
        assert request.paused.wait(60)
    # Concurrently, each in its own slot: none ends before all have begun.
    short = {"priority": 1, "max_tokens": 2}
    better = [loaded.begin(Asking(prompt_of(9, index), short, 1)) for index in range(SLOTS)]
    for request in better:
        assert request.paused.wait(60)
    for request in better:
        request.read_on()
    assert all(request.tokens for request in better)
    for request in slow:
        request.read_on()

    assert [request.tokens for request in whole] == [request.tokens for request in slow]
    assert loaded.model.counts.preemptions - before == SLOTS
    for one, other in zip(whole, slow, strict=True):
        ends = [{**request.told, "cached_tokens": 0} for request in (one, other)]
        assert ends[0] == ends[1]
        texts = [[a["text"][0] for a in request.answers if "text" in a] for request in (one, other)]
        assert texts[0] == texts[1]
        for name in ("logprob", "top_tokens", "top_logprobs"):
            found = [np.concatenate([a[name] for a in request.answers]) for request in (one, other)]
            np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    assert slow[1].told["stop_string"] == stop
    assert len(slow[2].answers[-1]["top_tokens"]) == 3
