"""Merges the tensors in a model's configuration with the tensors that its class declares."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import betterproto

from xlaserve.artifact.signature import Signature, from_config
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ConfigTensor, ModelConfig
from xlaserve.tensors import DATATYPES, describe


def agreed(config: ModelConfig, model: Any) -> Signature:
    """Return the signature of a model; raises InvalidModel if configuration and class disagree.

    A value that one of them omits is taken from the other.
    """
    batch = _batch(config, model)
    return from_config(
        replace(
            config,
            max_batch_size=batch,
            inputs=_both("input", config.inputs, _declared("inputs", model)),
            outputs=_both("output", config.outputs, _declared("outputs", model)),
        ),
        is_code=True,
    )


def asks_for_batches(config: ModelConfig) -> bool:
    """Tell whether a configuration contains dynamic_batching, even an empty message."""
    if config.message is None:
        return False
    chosen, _ = betterproto.which_one_of(config.message, "scheduling_choice")
    return chosen == "dynamic_batching"


def _batch(config: ModelConfig, model: Any) -> int:
    declared = getattr(model, "max_batch_size", 0)
    if not isinstance(declared, int) or declared < 0:
        raise InvalidModel(f"max_batch_size of its class: expected 0 or more, got {declared!r}")
    if not config.max_batch_size and not config.is_unbatched:
        return declared
    if declared and bool(config.max_batch_size) != bool(declared):
        raise InvalidModel(
            f"max_batch_size: its class has {declared}, the configuration {config.max_batch_size}"
        )
    return config.max_batch_size


def _declared(kind: str, model: Any) -> tuple[ConfigTensor, ...]:
    found: list[ConfigTensor] = []
    try:
        for name, (datatype, dims) in dict(getattr(model, kind, {})).items():
            if datatype not in DATATYPES:
                known = ", ".join(DATATYPES)
                raise InvalidModel(
                    f"{kind} of its class, '{name}': expected one of {known}, got {datatype!r}"
                )
            found.append(ConfigTensor(str(name), DATATYPES[datatype], tuple(map(int, dims))))
    except (TypeError, ValueError) as error:
        expected = 'a datatype and dims by name, as {"x": ("FP32", [4])}'
        raise InvalidModel(f"{kind} of its class: expected {expected}, got {error}") from None
    return tuple(found)


def _both(
    kind: str, configured: Sequence[ConfigTensor], declared: Sequence[ConfigTensor]
) -> tuple[ConfigTensor, ...]:
    if not configured or not declared:
        return tuple(configured or declared)
    by_name = {tensor.name: tensor for tensor in declared}
    for tensor in configured:
        own = by_name.pop(tensor.name, None)
        if own is None:
            raise InvalidModel(f"{kind} '{tensor.name}' of the configuration is not in its class")
        if (own.datatype, own.dims) != (tensor.datatype, tensor.dims):
            raise InvalidModel(
                f"{kind} '{tensor.name}': its class has {describe(own.datatype, own.dims)}, "
                f"the configuration {describe(tensor.datatype, tensor.dims)}"
            )
    for name in by_name:
        raise InvalidModel(f"{kind} '{name}' of its class is not in the configuration")
    return tuple(configured)
