"""Configurations in the JSON form that Triton passes to models, and `pb_utils.ModelConfig`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import betterproto

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig as ReadConfig
from xlaserve.model_config.schema import Field, schema_of
from xlaserve.model_config.text import parse_json
from xlaserve_proto import inference

Json = Any
"""Any JSON value."""


def as_dict(message: betterproto.Message) -> dict[str, Json]:
    """Return a configuration as JSON, with snake_case names, and 64-bit integers as numbers.

    Fields that are not set have their default values, except message fields, which are omitted.
    """
    found: dict[str, Json] = {}
    for field in schema_of(type(message)).by_name.values():
        value = vars(message).get(field.attribute, betterproto.PLACEHOLDER)
        if field.oneof:
            chosen, _ = betterproto.which_one_of(message, field.oneof)
            if chosen != field.attribute:
                continue
        elif field.kind == "message" and not field.repeated:
            given = isinstance(value, betterproto.Message) and betterproto.serialized_on_wire(value)
            if not given:
                continue
        elif value is betterproto.PLACEHOLDER:
            value = getattr(message, field.attribute)
        found[field.name] = _shown(field, value)
    return found


def _shown(field: Field, value: Any) -> Json:
    if field.kind == "map":
        return {str(key): _one(field, entry) for key, entry in value.items()}
    return [_one(field, one) for one in value] if field.repeated else _one(field, value)


def _one(field: Field, value: Any) -> Json:
    if isinstance(value, betterproto.Message):
        return as_dict(value)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if field.members is not None:
        names = {int(member): name for name, member in field.members.items()}
        return names.get(int(value), int(value))
    return value


def completed(name: str, config: ReadConfig, kind: Any) -> ReadConfig:
    """Return the configuration after the class's `auto_complete_config`, if it defines one.

    Raises InvalidModel if the result is not a valid configuration; exceptions of the code
    propagate.
    """
    complete = getattr(kind, "auto_complete_config", None)
    if complete is None:
        return config
    message = config.message or inference.ModelConfig(name=name, backend="python")
    before = as_dict(message)
    before["name"] = before["name"] or name
    made = complete(ModelConfig(json.dumps(before)))
    if not isinstance(made, ModelConfig):
        got = type(made).__name__
        raise InvalidModel(f"auto_complete_config: expected a pb_utils.ModelConfig, got {got}")
    text = json.dumps(made.as_dict())
    return parse_json(text, source="auto_complete_config")


class ModelConfig:
    """A configuration that `auto_complete_config` may modify."""

    def __init__(self, model_config: str) -> None:
        self._config: dict[str, Json] = json.loads(model_config)

    def as_dict(self) -> dict[str, Json]:
        """Return the configuration; callers must not modify it."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set max_batch_size; raises ValueError if the configured value is higher."""
        configured = self._config["max_batch_size"]
        if configured > max_batch_size:
            raise self._conflict("max_batch_size", configured, max_batch_size)
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching; raises ValueError if another scheduler is configured."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise self._conflict("the scheduler", other, "dynamic_batching")
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Json]) -> None:
        """Add an input; raises ValueError if it contradicts a configured input of this name."""
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: Mapping[str, Json]) -> None:
        """Add an output; raises ValueError if it contradicts a configured output of this name."""
        self._add("output", output, ("name", "data_type", "dims"))

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Json]) -> None:
        """Set whether the model is decoupled; raises ValueError if the configuration disagrees."""
        for name in transaction_policy_dict:
            if name != "decoupled":
                raise ValueError(f"model_transaction_policy: expected 'decoupled', got '{name}'")
        policy = self._config.setdefault("model_transaction_policy", {})
        for name, wanted in transaction_policy_dict.items():
            if policy.setdefault(name, wanted) != wanted:
                raise self._conflict(name, policy[name], wanted)

    def _add(self, kind: str, tensor: Mapping[str, Json], known: Sequence[str]) -> None:
        place = f"{kind} '{tensor.get('name', '')}'"
        for name in tensor:
            if name not in known:
                raise ValueError(f"{place}: expected {', '.join(known)}, got '{name}'")
        for name in ("name", "data_type", "dims"):
            if name not in tensor:
                raise ValueError(f"{place}: '{name}' is missing")
        for there in self._config[kind]:
            if there["name"] == tensor["name"]:
                self._agree(place, there, tensor)
                return
        self._config[kind].append(dict(tensor))

    def _agree(self, place: str, there: dict[str, Json], tensor: Mapping[str, Json]) -> None:
        for name, wanted in tensor.items():
            configured = there.get(name)
            is_open = configured in (None, "TYPE_INVALID", [])
            if not is_open and configured != wanted:
                raise self._conflict(f"{place}: {name}", configured, wanted)
            there[name] = wanted

    def _conflict(self, place: str, configured: object, wanted: object) -> ValueError:
        return ValueError(
            f"model '{self._config['name']}', {place}: the configuration has {configured}, "
            f"auto_complete_config {wanted}"
        )
