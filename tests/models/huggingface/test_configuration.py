"""Every key of config.json is either respected or refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from xlaserve.errors import InvalidModel
from xlaserve.importers.huggingface import configuration
from xlaserve.importers.huggingface.form import Rope

DATA = Path(__file__).parents[2] / "data/huggingface"


def config(name: str, **changes: object) -> dict[str, Any]:
    return {**json.loads((DATA / name / "config.json").read_text()), **changes}


def test_scalings_are_read_as_older_transformers_wrote_them() -> None:
    """`rope_scaling` next to `rope_theta`, with its kind named `type`, means the same."""
    new = config("llama")
    scaling = dict(new["rope_parameters"])
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    old["rope_scaling"] = scaling

    assert configuration.form_of(new) == configuration.form_of(old)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("mistral", {"sliding_window": None}, (None, None)),
        ("mistral", {}, (8, 8)),
        ("gemma2", {"layer_types": None}, (8, None)),
        ("qwen3", {"layer_types": None}, (None, 8)),
        ("qwen3", {"use_sliding_window": False}, (None, None)),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, (8, 8)),
    ],
)
def test_windows(name: str, changes: dict[str, object], windows: object) -> None:
    assert windows == configuration.form_of(config(name, **changes)).windows


def longrope(**changes: object) -> dict[str, object]:
    """Return the config.json position settings for longrope, with changes."""
    stated = json.loads((DATA / "phi3-long/config.json").read_text())["rope_parameters"]
    return {"rope_parameters": {**stated, **changes}}


def yarn(**changes: object) -> dict[str, object]:
    """Return the config.json position settings for yarn, with changes."""
    stated = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    return {"rope_parameters": {**stated, "original_max_position_embeddings": 32, **changes}}


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 1 + 0.1 * math.log(4)),
        ({"attention_factor": None}, 1 + 0.1 * math.log(4)),
        ({"attention_factor": 1.25, "mscale": 3.0, "mscale_all_dim": 1.0}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 3.0}, 1 + 0.1 * math.log(4)),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_sharpens_attention(changes: dict[str, object], scale: float) -> None:
    ropes = configuration.form_of(config("llama", **yarn(**changes))).ropes

    assert [pytest.approx(scale)] * 2 == [rope.scale for rope in ropes]


def test_yarn_divides_no_pair_that_turns_often_and_all_that_turn_rarely() -> None:
    """The ramp lies between beta_fast and beta_slow rotations within the original length."""
    (rope, _) = configuration.form_of(config("llama", **yarn(factor=8.0))).ropes
    (plain, _) = configuration.form_of(config("llama", rope_parameters={"rope_theta": 1e4})).ropes
    ratios = [old / new for old, new in zip(plain.frequencies, rope.frequencies, strict=True)]

    assert pytest.approx(1) == ratios[0]
    assert sorted(ratios) == pytest.approx(ratios)
    assert [pytest.approx(8)] * 5 == ratios[3:]


def test_longrope_is_read_as_older_checkpoints_have_it() -> None:
    """`su` in `rope_scaling`, with only the original length next to it."""
    new = config("phi3-long")
    scaling = dict(new["rope_parameters"])
    del scaling["rope_type"], scaling["original_max_position_embeddings"]
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {name: scaling.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
    old["rope_scaling"] = {**scaling, "type": "su"}

    assert configuration.form_of(new) == configuration.form_of(old)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, math.sqrt(1 + math.log(8) / math.log(16))),
        ({"factor": 16.0}, math.sqrt(2)),
        ({"factor": 0.5}, 1),
        ({"attention_factor": 1.5, "factor": 4}, 1.5),
    ],
)
def test_longrope_sharpens_attention_by_how_much_longer_it_is(
    changes: dict[str, object], scale: float
) -> None:
    ropes = configuration.form_of(config("phi3-long", **longrope(**changes))).ropes

    assert [pytest.approx(scale)] * 2 == [rope.scale for rope in ropes]


def test_gemma3_is_read_as_older_transformers_wrote_it() -> None:
    kinds_of_layers = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    new = config("gemma3", num_hidden_layers=7, layer_types=kinds_of_layers)
    kinds = new["rope_parameters"]
    old = {k: v for k, v in new.items() if k not in {"rope_parameters", "layer_types"}}
    old["rope_local_base_freq"] = kinds["sliding_attention"]["rope_theta"]
    old["rope_theta"] = kinds["full_attention"]["rope_theta"]
    old["rope_scaling"] = {"rope_type": "linear", "factor": kinds["full_attention"]["factor"]}
    old["sliding_window_pattern"] = 6

    assert configuration.form_of(new) == configuration.form_of(old)
    assert (8,) * 5 + (None, 8) == configuration.form_of(new).windows


def test_gpt2_widens_four_times_where_nothing_is_said() -> None:
    assert 256 == configuration.form_of(config("gpt2", n_inner=None)).intermediate
    assert 80 == configuration.form_of(config("gpt2", n_inner=80)).intermediate


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, (False, True, False, False)),
        ({"mlp_only_layers": None}, (False, True, False, True)),
        ({"decoder_sparse_step": None}, (True, True, True, False)),
    ],
)
def test_layers_with_experts(changes: dict[str, object], sparse: tuple[bool, ...]) -> None:
    experts = configuration.form_of(config("qwen3-moe", **changes)).experts

    assert experts is not None
    assert sparse == experts.layers


@pytest.mark.parametrize(
    ("changes", "rotated"),
    [
        ({}, (True, False, True, False)),
        ({"no_rope_layers": None}, (True, True, True, False)),
        ({"no_rope_layers": None, "no_rope_layer_interval": 3}, (True, True, False, True)),
        ({"no_rope_layers": None, "no_rope_layer_interval": None}, (True, True, True, False)),
        ({"no_rope_layers": [0, 1, 1, 0, 1]}, (False, True, True, False)),
    ],
)
def test_layers_without_positions(changes: dict[str, object], rotated: tuple[bool, ...]) -> None:
    """SmolLM3's other layers all have the same rotation."""
    ropes = configuration.form_of(config("smollm3", **changes)).ropes

    assert rotated == tuple(rope.frequencies != () for rope in ropes)
    assert 1 == len(set(ropes) - {Rope()})


def test_layers_without_positions_have_the_window_where_nothing_names_the_kinds() -> None:
    form = configuration.form_of(config("smollm3", layer_types=None))
    off = configuration.form_of(config("smollm3", layer_types=None, use_sliding_window=False))

    assert (None, 8, None, 8) == form.windows
    assert (None,) * 4 == off.windows


def test_keys_of_published_checkpoints_without_effect() -> None:
    """SmolLM3-3B has them, and no release of transformers reads them."""
    published = config("smollm3", pretraining_tp=2, max_window_layers=28)

    assert configuration.form_of(config("smollm3")) == configuration.form_of(published)


def test_factors_of_granite_are_1_where_nothing_is_said() -> None:
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
    form = configuration.form_of(config("granite", **dict.fromkeys((*names, "logits_scaling"))))
    found = form.embedding_scale, form.residual_scale, form.attention_scale, form.logit_divisor

    assert (1.0,) * 4 == found


def test_experts_are_counted_as_older_transformers_wrote_it() -> None:
    """`num_experts`, where transformers 5 writes `num_local_experts`; both if they agree."""
    new = config("qwen3-moe")
    old = {key: value for key, value in new.items() if key != "num_local_experts"}
    old["num_experts"] = new["num_local_experts"]

    assert configuration.form_of(new) == configuration.form_of(old)
    assert configuration.form_of(new) == configuration.form_of({**new, **old})


def test_a_mixture_with_a_window_has_it_in_all_layers() -> None:
    assert (8,) * 4 == configuration.form_of(config("qwen3-moe", **WINDOW)).windows
    assert (8,) * 2 == configuration.form_of(config("mixtral", sliding_window=8)).windows


WINDOW = {"use_sliding_window": True, "sliding_window": 8}
REFUSED = [
    ("llama", {"architectures": ["MambaForCausalLM"]}, "architectures: expected one of Llama"),
    ("llama", {"clip_qkv": 8}, "'clip_qkv' is not supported and may change the computation"),
    ("llama", {"sliding_window": 8}, "'sliding_window' is not supported"),
    (
        "llama",
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "quantization_config: expected None, got {'quant_method': 'gptq'",
    ),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp: expected 1, got 2"),
    ("llama", {"hidden_act": "relu"}, "hidden_act: expected one of silu, .* got 'relu'"),
    ("llama", {"hidden_size": "64"}, "hidden_size: expected a whole number from 1 to"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 4"),
    ("llama", {"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps: expected a number above 0, got 0"),
    ("llama", {"eos_token_id": [1, "x"]}, "eos_token_id: expected token numbers"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type 'dynamic', expected"),
    ("llama", {"rope_parameters": {"rope_type": "default"}}, "rope_theta of rope_parameters"),
    ("llama", {"rope_parameters": 7}, "rope_parameters: expected an object, got 7"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "mscale": 1.0}}, "unknown fields ..mscale"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types: expected 2 times one of"),
    ("qwen3", {"head_dim": None}, "head_dim: expected a whole number"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected"),
    (
        "phi3",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}},
        "partial_rotary_factor: expected to rotate an even number of the 16 elements",
    ),
    ("llama", yarn(original_max_position_embeddings=None), "original_max_position_embeddings of"),
    ("llama", yarn(beta_slow=32), "beta_slow 32.0 is not below beta_fast 32.0"),
    ("llama", yarn(truncate=1), "truncate of rope_parameters: expected true or false, got 1"),
    ("llama", yarn(rope_theta=1), "rope_theta: expected more than 1, got 1.0"),
    ("llama", yarn(mscale=-1), "mscale of rope_parameters: expected a number above 0, got -1"),
    ("llama", yarn(beta_fast=1e308), "beta_fast of rope_parameters: expected a number from 1e-09"),
    ("llama", yarn(factor=1e-300), "factor of rope_parameters: expected a number from 1e-09"),
    ("phi3-long", longrope(short_factor=[1, 2]), "short_factor of .*: expected 4 numbers, got 2"),
    ("phi3-long", longrope(long_factor=None), "long_factor of .*: expected 4 numbers, got None"),
    ("phi3-long", longrope(long_factor=[1, 2, 3, 0]), "long_factor .* a number above 0, got 0"),
    ("phi3-long", longrope(original_max_position_embeddings=1), "a whole number above 1, got 1.0"),
    ("phi3", longrope(rope_type="default"), "of rope_type 'default' has unknown"),
    ("gpt2", {"hidden_size": 64}, "'hidden_size' is not supported and may change the computation"),
    ("gpt2", {"rope_theta": 1e4}, "'rope_theta' is not supported and may change the computation"),
    ("gpt2", {"n_embd": 0}, "n_embd: expected a whole number from 1 to"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "layer_idx: expected False, got True"),
    ("llama", {"n_embd": 64}, "'n_embd' is not supported and may change the computation"),
    ("gemma3", {"sliding_window": None}, "sliding_window: expected a whole number"),
    (
        "gemma3",
        {"rope_parameters": {"rope_theta": 1e4}},
        "expected an object for each of sliding_attention and",
    ),
    (
        "gemma3",
        {"rope_local_base_freq": 1e4},
        "expected either rope_local_base_freq or rope_parameters",
    ),
    ("gemma3", {"rope_parameters": None}, "rope_theta of rope_local_base_freq: expected a number"),
    ("llama", {"num_experts": 4}, "'num_experts' is not supported and may change the computation"),
    (
        "mixtral",
        {"norm_topk_prob": False},
        "'norm_topk_prob' is not supported and may change the computation",
    ),
    ("mixtral", {"num_local_experts": None}, "num_local_experts: expected a whole number"),
    (
        "mixtral",
        {"num_experts_per_tok": 5},
        "num_experts_per_tok: expected a .* from 1 to 4, got 5",
    ),
    (
        "qwen3-moe",
        {"mlp_only_layers": [4]},
        "mlp_only_layers: expected numbers of layers from 0 to",
    ),
    ("qwen3-moe", {"mlp_only_layers": 3}, "mlp_only_layers: expected .* got 3"),
    (
        "qwen3-moe",
        {"decoder_sparse_step": 0},
        "decoder_sparse_step: expected a whole number from 1",
    ),
    ("qwen3-moe", {**WINDOW, "max_window_layers": 2}, "max_window_layers: expected 0 or none"),
    ("qwen2-moe", {**WINDOW, "layer_types": None}, "layer_types: expected 2 times one of"),
    ("smollm3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers: expected 4 times 1 .rotated. or 0"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, 2]}, "no_rope_layers: expected 4 times 1"),
    ("smollm3", {"no_rope_layers": [True] * 4}, "no_rope_layers: expected 4 times 1"),
    (
        "llama",
        {"no_rope_layers": [1, 1]},
        "'no_rope_layers' is not supported and may change the computation",
    ),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier: expected a number above 0"),
    (
        "llama",
        {"logits_scaling": 2.0},
        "'logits_scaling' is not supported and may change the computation",
    ),
    ("olmo2", {"clip_qkv": 8.0}, "'clip_qkv' is not supported and may change the computation"),
]


@pytest.mark.parametrize(("name", "changes", "text"), REFUSED)
def test_refused_by_name(name: str, changes: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidModel, match=text):
        configuration.form_of(config(name, **changes))


@pytest.mark.parametrize("text", ["[]", "{", ""])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidModel, match=r"config\.json: expected an object"):
        configuration.read(tmp_path)
