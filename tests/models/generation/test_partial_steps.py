"""Steps with fewer rows than slots: equal tokens, and other slots stay untouched."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from structlog.testing import capture_logs
from support import tiny_language
from support.generators import Asking, Loaded, load, prompt_of
from support.tiny_language import LENGTH, VOCAB, greedy

from xlaserve import export_generator
from xlaserve.artifact import generator_record as record
from xlaserve.artifact.sizes import EXECUTABLE_BYTES
from xlaserve.errors import InvalidModel
from xlaserve.generation.in_place import Memory, check_partial
from xlaserve.generation.loading import GeneratorModel
from xlaserve.generation.sampling import INTEGERS, REALS
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.generator import configured

SLOTS, SIZES = 6, (1, 2, 4)
CONFIG = {"slots": str(SLOTS), "step_sizes": "1,2,4", "windows": "16"}
SAMPLED = {"temperature": 1.5, "ignore_eos": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_language.export(tmp_path_factory.mktemp("models") / "story" / "1")


@pytest.fixture(scope="module", params=["true", pytest.param("false", marks=pytest.mark.slow)])
def model(directory: Path, request: pytest.FixtureRequest) -> Iterator[GeneratorModel]:
    """A model that writes back its row, and one that writes back the whole window."""
    loaded = load(directory, **CONFIG, prefix_cache=request.param)
    yield loaded
    loaded.close()


@pytest.fixture
def sizes(model: GeneratorModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the row count of each step."""
    programs: Any = model._programs
    step, found = programs.step, []

    def noted(window: int, integers: Any, *others: Any, **slots: Any) -> Any:
        found.append(len(integers))
        return step(window, integers, *others, **slots)

    monkeypatch.setattr(programs, "step", noted)
    return found


def state_of(model: GeneratorModel) -> list[Any]:
    """Return copies of the cache and of the tables."""
    programs: Any = model._programs
    return [np.array(array) for array in (*programs._cache, *programs._tables)]


def fill(model: GeneratorModel) -> None:
    """Fill every position of every slot with other values."""
    programs, slots = (getattr(model, name) for name in ("_programs", "_slots"))
    slots._batch.take_all()  # forget the cached rows, which this overwrites
    programs.reset()
    for slot in range(SLOTS):
        programs.begin(
            slot, np.array(prompt_of(9, slot), np.int32), {10 + slot: 100.0, 20 + slot: 50.0}
        )
        for start in range(0, LENGTH, 4):
            tokens = np.array(prompt_of(4, 100 * slot + start), np.int32)
            programs.prefill(LENGTH, tokens, slot, start, 4)


def rows_of(slots: list[int], size: int, position: int = 7) -> tuple[Any, Any, Any]:
    """Return the arguments of a step for some slots, and padding."""
    integers = np.zeros((size, len(INTEGERS)), np.int32)
    integers[:, :3] = 0, LENGTH, 0
    for row, slot in enumerate(slots):
        integers[row, :4] = 3 + slot, position + slot, 1, 0
    reals = np.zeros((size, len(REALS)), np.float32)
    reals[:, 1] = reals[:, 3] = 1
    padded = np.full(size, SLOTS, np.int32)
    padded[: len(slots)] = slots
    return integers, reals, padded


@pytest.mark.parametrize("count", range(1, SLOTS + 1))
def test_tokens_are_those_of_a_request_alone(
    model: GeneratorModel, sizes: list[int], count: int
) -> None:
    """Greedy tokens equal those of NumPy; seeded ones equal those of steps of another size."""
    loaded = Loaded(model)
    prompts = [prompt_of(3 + 4 * index, index) for index in range(count)]
    alone = [loaded.ask(p, seed=i, max_tokens=9, **SAMPLED).tokens for i, p in enumerate(prompts)]
    assert {1} == set(sizes)

    drawn = [loaded.ask(p, seed=i, max_tokens=9, **SAMPLED) for i, p in enumerate(prompts)]
    assert alone == [one.tokens for one in drawn]
    likeliest = [loaded.ask(p, max_tokens=9) for p in prompts]
    assert [greedy(p, 9) for p in prompts] == [one.tokens for one in likeliest]
    loaded.wait_until_idle()
    assert set(sizes) <= {size for size in (*SIZES, SLOTS) if size < 2 * count}
    assert 1 == count or len(set(sizes)) > 1


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_come_and_leave_at_random_change_no_token_of_others(
    model: GeneratorModel, sizes: list[int], seed: int
) -> None:
    """Nor do the changing step sizes and windows."""
    random_, loaded = random.Random(seed), Loaded(model)
    plans = [
        (prompt_of(random_.randint(1, 30), 50 * seed + index), random_.randint(4, 20))
        for index in range(24)
    ]
    alone = [
        loaded.ask(prompt, seed=index, max_tokens=count, **SAMPLED).tokens
        for index, (prompt, count) in enumerate(plans)
    ]
    asked: list[Asking] = []
    for index, (prompt, count) in enumerate(plans):
        asked.append(loaded.ask(prompt, seed=index, max_tokens=count, **SAMPLED))
        if not random_.randrange(3):
            random_.choice(asked).cancel()
        if not random_.randrange(2):
            assert random_.choice(asked).over.wait(60)
    loaded.wait_until_idle()

    assert {1} < set(sizes) <= {*SIZES, SLOTS}
    for expected, one in zip(alone, asked, strict=True):
        found = one.tokens
        assert found == expected[: len(found)]
        assert one.is_cancelled or found == expected
    assert sum(not one.is_cancelled for one in asked) > len(asked) // 3
    assert 0 == model.counts.running == model.counts.positions_used


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", [16, LENGTH])
def test_a_step_changes_the_row_of_its_position_alone(
    model: GeneratorModel, size: int, window: int
) -> None:
    """Every other bit of the cache and the counts stays, even in its own slot."""
    slots = [5, 0, 3, 2][:size]
    fill(model)
    before = state_of(model)
    integers, reals, numbers = rows_of(slots, size)
    programs: Any = model._programs

    step = programs.step(window, integers, reals, slots=numbers)

    *cache, counts, prompt, bias = state_of(model)
    for array, old in zip(cache, before, strict=False):
        changed = np.argwhere((array != old).any(axis=(1, 3))).tolist()
        assert sorted([slot, 7 + slot] for slot in slots) == changed
    changed = np.argwhere(counts != before[-3]).tolist()
    assert sorted([slot, int(step.tokens[row])] for row, slot in enumerate(slots)) == changed
    for array, old in zip((prompt, bias), before[-2:], strict=True):
        np.testing.assert_array_equal(array, old)


@pytest.mark.parametrize("size", SIZES)
def test_padding_is_dropped(model: GeneratorModel, size: int) -> None:
    """Although it has a valid position, and is marked as active."""
    fill(model)
    before = state_of(model)
    integers, reals, _ = rows_of([], size)
    integers[:, :3] = 4, 9, 1
    programs: Any = model._programs

    programs.step(LENGTH, integers, reals, slots=np.full(size, SLOTS, np.int32))

    for array, old in zip(state_of(model), before, strict=True):
        np.testing.assert_array_equal(array, old)


@pytest.mark.parametrize("size", SIZES)
def test_a_step_gives_what_one_of_all_slots_gives(model: GeneratorModel, size: int) -> None:
    """With the counts, prompts, biases and masks of its own slots."""
    slots = [4, 1, 5, 2][:size]
    programs: Any = model._programs
    found = []
    for numbers in (None, slots):
        fill(model)
        given, reals, padded = rows_of(slots, size)
        reals[:, 3], reals[:, 5] = 1.7, 0.6
        mask = np.full((size, 1), -1, np.int32)
        mask[:, 0] ^= [1 << (10 + slot) for slot in slots]
        if numbers is None:
            integers, all_reals, _ = rows_of([], SLOTS)
            all_mask = np.full((SLOTS, 1), -1, np.int32)
            integers[slots], all_reals[slots], all_mask[slots] = given, reals, mask
            step = programs.step(LENGTH, integers, all_reals, all_mask)
            found.append([array[slots] for array in step])
        else:
            found.append(list(programs.step(LENGTH, given, reals, mask, slots=padded)))
    whole, part = found

    assert [20 + slot for slot in slots] == part[0].tolist(), "of its own bias, but for its mask"
    for name, one, other in zip("tlTL", whole, part, strict=True):
        if name in "tT":
            np.testing.assert_array_equal(one, other)
        else:
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_state_without_positions_is_that_of_its_slot(tmp_path: Path) -> None:
    """The whole row of a slot is gathered and written back; other slots keep theirs."""

    def init_cache(params: Any, slots: int, length: int) -> Any:
        return {"sum": jnp.zeros((slots, 3)), "rows": jnp.zeros((slots, length))}

    def decode(params: Any, cache: Any, window: Any, tokens: Any, positions: Any) -> Any:
        slots = jnp.arange(tokens.shape[0])
        total = cache["sum"] + tokens.astype(jnp.float32)[:, None] + 1.0
        rows = cache["rows"].at[slots, positions].set(total[:, 0], mode="drop")
        seen = rows[:, : window.shape[0]].sum(axis=1)
        total = jnp.where((positions < rows.shape[1])[:, None], total, cache["sum"])
        return params["table"][(seen.astype(jnp.int32)) % VOCAB], {"sum": total, "rows": rows}

    def chunk(params: Any, cache: Any, window: Any, tokens: Any, *numbers: Any) -> Any:
        slot, start, n = numbers
        real = jnp.arange(tokens.shape[0]) < n
        before = jnp.where(start > 0, cache["sum"][slot, 0], 0.0)
        sums = before + jnp.cumsum(jnp.where(real, tokens + 1, 0)).astype(jnp.float32)
        at = jnp.where(real, start + jnp.arange(tokens.shape[0]), LENGTH)
        rows = cache["rows"].at[slot, at].set(sums, mode="drop")
        return params["table"][0], {"sum": cache["sum"].at[slot].set(sums[-1]), "rows": rows}

    table = np.random.default_rng(3).normal(0, 3, (VOCAB, VOCAB)).astype(np.float32)
    path = export_generator(
        *(decode, chunk, init_cache, {"table": table}, tmp_path / "sum" / "1"),
        vocab=VOCAB,
        max_length=LENGTH,
        stop_tokens=[],
    )
    found = []
    for steps in ("1,4", str(SLOTS)):
        model = load(path, **{**CONFIG, "step_sizes": steps})
        loaded = Loaded(model)
        asked = [loaded.ask(prompt_of(6 + i, i), max_tokens=4 + 5 * i) for i in range(5)]
        found.append([one.tokens for one in asked])
        loaded.wait_until_idle()
        model.close()

    assert found[0] == found[1]


def _ring(params: Any, cache: Any, window: Any, tokens: Any, positions: Any) -> Any:
    """Keep the last eight rows, in the first eight positions."""
    at = jnp.where(positions < LENGTH, positions % 8, positions)
    return tiny_language.decode(params, cache, window, tokens, at)


@pytest.mark.slow
def test_a_model_that_writes_elsewhere_has_its_window_written(tmp_path: Path) -> None:
    """A ring buffer in full-length arrays only needs `prefix_cache` set to false."""
    path = tiny_language.export(tmp_path / "ring" / "1", decode=_ring)
    found = []
    for steps in ("1,2,4", str(SLOTS)):
        model = load(path, **{**CONFIG, "step_sizes": steps, "prefix_cache": "false"})
        loaded = Loaded(model)
        found.append(loaded.ask(prompt_of(5), max_tokens=40, ignore_eos=True).tokens)
        loaded.wait_until_idle()
        model.close()

    assert found[0] == found[1]


def _by_length(params: Any, cache: Any, window: Any, tokens: Any, positions: Any) -> Any:
    """Reverse the logits if the cache is long, as models with scaled frequencies do."""
    logits, following = tiny_language.decode(params, cache, window, tokens, positions)
    is_long = jnp.asarray(cache[0]["k"].shape[2], jnp.int32) > 32
    return jnp.where(is_long, logits[:, ::-1], logits), following


@pytest.mark.slow
def test_arithmetic_that_depends_on_the_length_of_the_cache_has_steps_of_all(
    tmp_path: Path,
) -> None:
    """A trial during the load detects it; a configuration with other step sizes is refused."""
    path = tiny_language.export(tmp_path / "long" / "1", decode=_by_length)

    with capture_logs() as logs:
        model = load(path, slots=str(SLOTS))
    model.close()
    assert () == model.generation.step_sizes
    assert ["a step with fewer rows gave different tokens in a trial"] == [
        log["reason"] for log in logs if log["event"] == "smaller step sizes disabled"
    ]
    with pytest.raises(
        InvalidModel, match="'step_sizes': expected '6', since a step with fewer rows"
    ):
        load(path, **CONFIG)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [(1, ()), (2, (1,)), (8, (1,)), (15, (1,)), (16, (1, 4)), (64, (1, 4, 16))],
)
def test_sizes_that_pay_are_the_default(
    directory: Path, slots: int, expected: tuple[int, ...]
) -> None:
    """They have at most a quarter of the slots, or one row."""
    found = configured.read(
        record.read(directory), directory, ModelConfig(parameters={"slots": str(slots)})
    )

    assert expected == found.step_sizes


@pytest.mark.parametrize("written", ["0", "7", "1,x", "", ",".join("1" * 9)])
def test_sizes_that_no_step_can_have_are_refused(directory: Path, written: str) -> None:
    expected = "parameter 'step_sizes': expected up to 8 comma-separated numbers from 1 to 6"
    with pytest.raises(InvalidModel, match=expected):
        load(directory, **{**CONFIG, "step_sizes": written})


@pytest.mark.slow
def test_every_step_has_all_slots_where_that_is_asked_for(directory: Path) -> None:
    model = load(directory, **{**CONFIG, "step_sizes": str(SLOTS)})
    loaded = Loaded(model)

    assert greedy(prompt_of(4), 6) == loaded.ask(prompt_of(4), max_tokens=6).tokens
    loaded.wait_until_idle()
    model.close()
    assert () == model.generation.step_sizes
    assert model.counts.steps * SLOTS == model.counts.step_rows > 0


def test_rows_and_memory_are_counted(model: GeneratorModel, directory: Path) -> None:
    """Each size has a program per window; gathered rows are part of the predicted memory."""
    steps, rows = model.counts.steps, model.counts.step_rows
    loaded = Loaded(model)
    assert loaded.ask(prompt_of(4), max_tokens=3, ignore_eos=True).tokens
    loaded.wait_until_idle()
    sizes = [ModelConfig(parameters=CONFIG | {"step_sizes": text}) for text in ("1,2,4", "6")]
    predicted = [configured.predict_slots(directory, config) for config in sizes]
    cache = tiny_language.LAYERS * 2 * SLOTS * tiny_language.SIZE * LENGTH * 4

    assert (3, 3) == (model.counts.steps - steps, model.counts.step_rows - rows)
    assert cache * 4 // 6 + 3 * 2 * EXECUTABLE_BYTES == predicted[0] - predicted[1]
    made = 2 * (2 + model.generation.keeps_prefixes + 3) + 2
    assert made == model.info.compiled_programs + model.info.cached_programs


@pytest.mark.parametrize(
    "memory", [Memory(aliased=(8 << 20) - 1, temporaries=0), Memory(8 << 20, (5 << 20) + 1)]
)
def test_a_step_that_copies_the_cache_is_not_taken(memory: Memory) -> None:
    check_partial(Memory(8 << 20, 4 << 20), 8 << 20, 1 << 20, 0)
    with pytest.raises(InvalidModel, match="a step of fewer rows copies the cache"):
        check_partial(memory, 8 << 20, (4 << 20) // 3, 0)


@pytest.mark.slow
def test_one_that_would_copy_leaves_the_model_with_steps_of_all(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA chose to copy, which no author can change, so the load succeeds."""
    monkeypatch.setattr("xlaserve.generation.in_place._SLACK_BYTES", -(1 << 30))
    monkeypatch.setattr("xlaserve.generation.lowering.check_aliasing", lambda *given: None)

    model = load(directory, slots=str(SLOTS))
    loaded = Loaded(model)

    assert greedy(prompt_of(4), 6) == loaded.ask(prompt_of(4), max_tokens=6).tokens
    loaded.wait_until_idle()
    model.close()
    assert () == model.generation.step_sizes


def test_a_step_of_a_long_cache_copies_nothing_of_it(tmp_path: Path) -> None:
    """If the first write came before the last read, XLA would copy the array."""
    path = tiny_language.export(tmp_path / "long" / "1", max_length=1 << 14)

    model = load(path, slots="4", step_sizes="2", windows="16")
    model.close()

    assert (2,) == model.generation.step_sizes


def test_a_cache_in_place_is_the_same_memory(model: GeneratorModel) -> None:
    """Steps of every size leave each cache array at its address."""
    programs: Any = model._programs
    fill(model)
    places = [array.unsafe_buffer_pointer() for array in programs._cache]

    for size in SIZES:
        integers, reals, numbers = rows_of([2], size)
        programs.step(16, integers, reals, slots=numbers)

    assert places == [array.unsafe_buffer_pointer() for array in programs._cache]
