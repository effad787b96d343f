"""Model descriptions arrive unchanged, and no other types are decoded."""

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from xlaserve.files.roots import Roots
from xlaserve.model_config import text as config_text
from xlaserve.model_config.config import ModelConfig
from xlaserve.row_proofs.verdict import Independence, Verdict
from xlaserve.runtime.generator.info import GenerationInfo
from xlaserve.runtime.loaded import Bucket, ModelInfo, ModelMemory
from xlaserve.tensors import DATATYPES, TensorSpec
from xlaserve.workers.fronts.description import UnknownDescription, described, read

INFO = ModelInfo(
    "jax_export",
    (TensorSpec("x", DATATYPES["FP32"], (-1, 4)), TensorSpec("t", DATATYPES["BYTES"], (-1, 1))),
    (TensorSpec("y", DATATYPES["BF16"], (-1,)),),
    8,
    verdict=Verdict(Independence.MIXED, "y", "stablehlo.reduce", "reduces over the rows"),
    ragged=frozenset({"x"}),
    has_sequences=True,
)
CONFIG = """
max_batch_size: 8
input [
  { name: "x" data_type: TYPE_FP32 dims: [ 4 ] allow_ragged_batch: true },
  { name: "t" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [ { name: "y" data_type: TYPE_BF16 dims: [ ] } ]
batch_input [ { kind: BATCH_ITEM_SHAPE target_name: "s" data_type: TYPE_FP32 source_input: "x" } ]
version_policy { specific { versions: [ 1, 3 ] } }
dynamic_batching {
  preferred_batch_size: [ 4 ] priority_levels: 2 default_priority_level: 1
  priority_queue_policy { key: 1 value { max_queue_size: 5 } }
}
parameters { key: "p" value { string_value: "\\303\\251" } }
"""


def test_a_description_arrives_as_it_was_sent() -> None:
    """The datatypes are the table's own rows again, which are compared by identity."""
    default = np.arange(4, dtype=np.float32)
    optional = MappingProxyType({"t": None, "x": default})
    labels = MappingProxyType({"y": (b"cat", b"dog")})
    config = replace(config_text.parse_pbtxt(CONFIG), labels=labels)
    info, found = read(described(replace(INFO, optional=optional), config))

    assert config == found
    assert found.message == config.message
    found_default = info.optional["x"]
    assert found_default is not None
    assert default.tolist() == found_default.tolist()
    assert info.inputs[1].datatype is DATATYPES["BYTES"]
    assert replace(INFO, optional=optional) == replace(info, optional=optional)


def test_what_is_of_the_engine_alone_is_left_out() -> None:
    """Memory and compilation figures of all processes are added up, so only the engine has them."""
    memory = ModelMemory(parameters_bytes=5)
    given = replace(INFO, memory=memory, buckets=(Bucket(1, 1.0, 1.0),), compiled_programs=3)

    assert INFO == read(described(given, ModelConfig()))[0]


def test_a_generator_arrives_without_its_text() -> None:
    """Front ends read the text files again, from the directory in the description."""
    facts = GenerationInfo(
        *(32, 64, (5,), Path("/models/story/1"), 4, (64,), 8),
        roots=Roots((Path("/models"),)),
        no_text="has none",
        tool_family="hermes",
    )
    given = replace(INFO, generation=replace(facts, text=object()))  # type: ignore[arg-type]

    assert facts == read(described(given, ModelConfig()))[0].generation


@pytest.mark.parametrize(
    "said",
    [
        ["class", "Path", {}],
        ["class", "ModelInfo", {"nothing": 1}],
        ["call", "os.system", "true"],
        ["enum", "Path", "home"],
        5,
    ],
)
def test_nothing_but_descriptions_is_made(said: object) -> None:
    """Whatever class the name denotes elsewhere."""
    with pytest.raises((UnknownDescription, TypeError)):
        read(msgspec.msgpack.encode([said, said]))


@pytest.mark.parametrize("name", ["Compilation", "Declared", "LoadContext", "PythonHost"])
def test_nothing_of_a_load_is_made(name: str) -> None:
    """A front end loads no model, so its description has no load settings."""
    with pytest.raises(UnknownDescription, match=f"expected a class of descriptions, got '{name}'"):
        read(msgspec.msgpack.encode([["class", name, {}], 5]))


def test_what_has_no_form_is_refused() -> None:
    """Otherwise a front end would show something else than the engine has."""
    config = replace(ModelConfig(), parameters=MappingProxyType({"p": object()}))  # type: ignore[dict-item]
    with pytest.raises(UnknownDescription, match="object"):
        described(INFO, config)
