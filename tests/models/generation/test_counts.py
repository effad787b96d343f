"""The counters of a generator follow its requests, however they end."""

from collections.abc import Iterator

import pytest
from support import tiny_language
from support.generators import Asking, Loaded, load, prompt_of

from xlaserve.generation.loading import GeneratorModel
from xlaserve.runtime.generator.counts import Times


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GeneratorModel]:
    loaded = load(tiny_language.export(tmp_path_factory.mktemp("models") / "story" / "1"))
    yield loaded
    loaded.close()


def test_a_request_is_counted_while_it_runs_and_after(model: GeneratorModel) -> None:
    """Ten prompt positions and the generated token are counted; nothing is in use at the end."""
    loaded, counts = Loaded(model), model.counts
    before = counts.prompt_tokens, counts.output_tokens, sum(counts.token.buckets)
    held = Asking(prompt_of(11), {"max_tokens": 4, "ignore_eos": True})
    held.is_writable = False
    model.handle(0, [held], lambda: None)
    assert held.some.wait(60)

    # A second request makes the thread loop once more, after it has counted the first.
    assert loaded.ask(prompt_of(3), max_tokens=1).tokens
    loaded.wait_until_idle()
    assert (1, 11) == (counts.running, counts.positions_used)
    held.read_on()
    assert held.tokens
    loaded.ask(prompt_of(3), max_tokens=1)
    loaded.wait_until_idle()

    assert (0, 0) == (counts.running, counts.positions_used)
    found = counts.prompt_tokens, counts.output_tokens, sum(counts.token.buckets)
    assert [17, 6, 3] == [after - one for after, one in zip(found, before, strict=True)]
    assert 3 <= sum(counts.first_token.buckets)
    assert 0 < counts.host_ns


def test_a_cancelled_request_gives_its_positions_back(model: GeneratorModel) -> None:
    loaded, counts = Loaded(model), model.counts
    request = loaded.ask(prompt_of(9), ignore_eos=True)
    assert request.some.wait(60)
    request.is_cancelled = True
    loaded.wait_until_idle()
    loaded.ask(prompt_of(3), max_tokens=1)
    loaded.wait_until_idle()

    assert (0, 0) == (counts.running, counts.positions_used)


def test_times_that_are_added_together_are_counted_one_by_one() -> None:
    together, one_by_one = Times(), Times()

    together.add(3_000_000, 3)
    for _ in range(3):
        one_by_one.add(3_000_000)

    assert (together.buckets, together.total_ns) == (one_by_one.buckets, one_by_one.total_ns)
    assert (sum(together.buckets), together.total_ns) == (3, 9_000_000)
