"""A generator split over devices answers as on one device, and each device holds its part."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import tiny_language
from support.generators import SLOTS, prompt_of
from support.tiny_language import HEADS, LAYERS, LENGTH, SIZE, VOCAB, WIDTH, greedy
from support.virtual_devices import run_on_devices

SCRIPT = Path(__file__).with_name("on_devices.py")
TABLES = SLOTS * (9 * VOCAB + 4)
"""Bytes of the counts, prompts, biases and masks of all slots, replicated on each device."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tiny_language.export(tmp_path_factory.mktemp("models") / "story" / "1")
    found: dict[str, Any] = json.loads(run_on_devices(SCRIPT, directory, 2))
    return found


@pytest.mark.slow
def test_tokens_are_those_of_one_device(seen: dict[str, Any]) -> None:
    """Greedy tokens also equal those without a cache; both requests run concurrently."""
    one, two = seen["one"]["tokens"], seen["two"]["tokens"]
    expected = greedy(prompt_of(9, 9), 12)

    assert one == two
    assert expected == two[0][: len(expected)]


@pytest.mark.slow
def test_steps_of_fewer_rows_are_of_a_cache_whose_slots_are_whole(seen: dict[str, Any]) -> None:
    """If positions are split, every step covers all slots; its tokens are the same."""
    one, two, positions = seen["one"], seen["two"], seen["positions"]

    assert ([1], [1], []) == (one["step_sizes"], two["step_sizes"], positions["step_sizes"])
    assert (True, True, False) == (one["alone"], two["alone"], positions["alone"])
    assert one["tokens"] == two["tokens"] == positions["tokens"]


@pytest.mark.slow
def test_each_device_holds_and_reserves_its_part(seen: dict[str, Any]) -> None:
    one, two = seen["one"], seen["two"]
    cache = 4 * 2 * LAYERS * SLOTS * HEADS * LENGTH * WIDTH
    split, whole = 4 * 4 * LAYERS * SIZE * SIZE, 4 * SIZE * (VOCAB + LENGTH + VOCAB)

    assert [[SLOTS, HEADS // 2, LENGTH, WIDTH]] * 2 * LAYERS == two["cache"]
    assert (split + whole, split + 2 * whole) == (one["parameters_bytes"], two["parameters_bytes"])
    assert (cache + TABLES, cache + 2 * TABLES) == (one["states_bytes"], two["states_bytes"])
    assert {} == one["per_device"]
    assert ["cpu:0", "cpu:1"] == list(two["per_device"])
    assert two["total_bytes"] == sum(two["per_device"].values())
    first, second = two["per_device"].values()
    assert first - second == SLOTS * LENGTH * 4, "tokens of kept rows are on the host, once"
    saved = one["predicted"]["cpu:0"] - two["predicted"]["cpu:1"]
    gathered = cache // SLOTS
    assert (cache + gathered + split) // 2 == saved
    assert two["predicted"]["cpu:0"] == two["predicted"]["cpu:1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("slots", "'cache/0': dimension 0 of [3, 2, 64, 8] cannot be split into 2 equal parts"),
        ("name", "partition rule 'cache/9' matches no parameter"),
        ("axis", "partition rule 'cache/*': no axis 'heads', the mesh has 'model'"),
    ],
)
def test_what_cannot_be_split_is_refused(seen: dict[str, Any], name: str, text: str) -> None:
    assert text in seen["refused"][name]
