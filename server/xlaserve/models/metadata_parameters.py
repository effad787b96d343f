"""The parameters of a model and of its tensors, as ModelMetadata shows them."""

import json

from xlaserve.models.config import ModelConfig
from xlaserve.models.config_fields import CONTENT_TYPE
from xlaserve_proto import inference

MOST_BYTES = 127
"""The longest value of a model's parameter that is shown.

In the Open Inference Protocol the map has texts, here and in MLServer it has messages. Its clients
read a message with a text of up to so many bytes as a text; a longer one makes the answer one that
they cannot read."""

MOST_LABEL_BYTES = 16 << 10
"""The longest list of labels that is shown, as JSON."""


def of_model(config: ModelConfig) -> dict[str, str]:
    """Return the parameters of the configuration, but for those of single tensors."""
    return {
        name: value
        for name, value in config.parameters.items()
        if not name.startswith(f"{CONTENT_TYPE}.") and len(value.encode()) <= MOST_BYTES
    }


def of_input(config: ModelConfig, name: str) -> dict[str, str]:
    """Return the content type of an input, and its format where it is an image."""
    found = _content_type(config, name)
    for tensor in config.message.input if config.message else ():
        if tensor.name == name and tensor.format != inference.ModelInputFormat.FORMAT_NONE:
            found["format"] = str(tensor.format.name)
    return found


def of_output(config: ModelConfig, name: str) -> dict[str, str]:
    """Return the content type of an output, and its labels as a list in JSON."""
    found = _content_type(config, name)
    labels = config.labels.get(name)
    if labels:
        text = json.dumps([label.decode(errors="replace") for label in labels], ensure_ascii=False)
        if len(text.encode()) <= MOST_LABEL_BYTES:
            found["labels"] = text
    return found


def _content_type(config: ModelConfig, name: str) -> dict[str, str]:
    said = config.parameters.get(f"{CONTENT_TYPE}.{name}")
    return {CONTENT_TYPE: said} if said else {}
