"""Parameters of models and tensors in ModelMetadata."""

import json

from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.fields import CONTENT_TYPE, DEFAULT
from xlaserve.runtime.loaded import ModelInfo
from xlaserve_proto import inference

MOST_BYTES = 127
"""Maximum length in bytes of a model parameter's value in ModelMetadata.

The Open Inference Protocol defines a map of strings; here, as in MLServer, it is a map of messages.
Clients of the former decode a message with a string of up to this length as a string, and fail to
decode the response if it is longer.
"""

_OF_TENSORS = (f"{CONTENT_TYPE}.", DEFAULT)

MOST_LABEL_BYTES = 16 << 10
"""Maximum size in bytes of a list of labels as JSON; longer lists are omitted."""


DECOUPLED = "decoupled"
OPTIONAL = "optional"
PRECISION = "matmul_precision"
_TRUE = "true"


def of_model(config: ModelConfig, info: ModelInfo) -> dict[str, str]:
    """Return the configuration's parameters, except for those of individual tensors.

    Adds whether the model is decoupled, so that clients need not request ModelConfig
    (model_transaction_policy) to find out, and on a GPU or TPU the precision of FP32 products.
    """
    found = {
        name: value
        for name, value in config.parameters.items()
        if not name.startswith(_OF_TENSORS) and len(value.encode()) <= MOST_BYTES
    }
    if info.is_decoupled:
        found[DECOUPLED] = _TRUE
    if info.matmul_precision:
        found[PRECISION] = info.matmul_precision
    return found


def of_input(config: ModelConfig, info: ModelInfo, name: str) -> dict[str, str]:
    """Return an input's content type, image format and default, and whether it is optional."""
    found = _content_type(config, name)
    if name in info.optional:
        found[OPTIONAL] = _TRUE
        default = config.parameters.get(f"{DEFAULT}{name}")
        if info.optional[name] is not None and default and len(default.encode()) <= MOST_BYTES:
            found["default"] = default
    for tensor in config.message.input if config.message else ():
        if tensor.name == name and tensor.format != inference.ModelInputFormat.FORMAT_NONE:
            found["format"] = str(tensor.format.name)
    return found


def of_output(config: ModelConfig, name: str) -> dict[str, str]:
    """Return an output's content type, and its labels as a JSON list."""
    found = _content_type(config, name)
    labels = config.labels.get(name)
    # In JSON each label needs at least three more bytes.
    if labels and 3 * len(labels) <= MOST_LABEL_BYTES:
        text = json.dumps([label.decode(errors="replace") for label in labels], ensure_ascii=False)
        if len(text.encode()) <= MOST_LABEL_BYTES:
            found["labels"] = text
    return found


def _content_type(config: ModelConfig, name: str) -> dict[str, str]:
    content_type = config.parameters.get(f"{CONTENT_TYPE}.{name}")
    return {CONTENT_TYPE: content_type} if content_type else {}
