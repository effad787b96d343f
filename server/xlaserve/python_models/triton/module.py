"""Creates the module `triton_python_backend_utils` of one model."""

from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

from xlaserve.python_models.triton import (
    config,
    errors,
    loading,
    messages,
    reporting,
    responses,
    tensor,
    types,
)
from xlaserve.runtime.host import PythonHost

NAME = "triton_python_backend_utils"


def module_of(model: str, directory: Path, host: PythonHost, owner: object) -> ModuleType:
    """Create the module with the logger, metrics and calls of one model.

    All models share the other classes, so that tensors can be passed between them.
    """
    module = ModuleType(NAME, "Triton's Python model utilities, as implemented by this server.")
    request = type("InferenceRequest", (messages.InferenceRequest,), {"calls": host.calls})
    family: dict[str, Any] = {"metrics": host.metrics, "owner": owner}
    loads = loading.ModelLoading(model, host.calls)
    bound = {
        "InferenceRequest": request,
        "Logger": reporting.Logger(model),
        "MetricFamily": type("MetricFamily", (reporting.MetricFamily,), family),
        "get_model_dir": lambda: str(directory),
        "is_model_ready": loads.is_model_ready,
        "load_model": loads.load_model,
        "unload_model": loads.unload_model,
    }
    vars(module).update({**_SHARED, **bound})
    return module


def _by_name(items: Any, name: str) -> Any:
    return next((item for item in items if item.name() == name), None)


def get_input_tensor_by_name(inference_request: Any, name: str) -> Any:
    """Return an input tensor of a request, or None if it has no input of this name."""
    return _by_name(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: Any, name: str) -> Any:
    """Return an output tensor of a response, or None if it has no output of this name."""
    return _by_name(inference_response.output_tensors(), name)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Return an input of a configuration, or None if it has no input of this name."""
    return next((one for one in model_config.get("input", ()) if one["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Return an output of a configuration, or None if it has no output of this name."""
    return next((one for one in model_config.get("output", ()) if one["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Tell whether a configuration makes its model decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


class MemoryType(IntEnum):
    """Kinds of memory, as Triton numbers them."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 2


class PreferredMemory:
    """Accepted for compatibility and ignored: outputs of called models are always on the host."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        """Accept and ignore the arguments."""


_SHARED: Mapping[str, Any] = {
    "InferenceResponse": responses.InferenceResponse,
    "InferenceResponseSender": messages.InferenceResponseSender,
    "InferenceTrace": messages.InferenceTrace,
    "MemoryType": MemoryType,
    "Metric": reporting.LabelledMetric,
    "MetricKind": reporting.MetricKind,
    "ModelConfig": config.ModelConfig,
    "PreferredMemory": PreferredMemory,
    "ResponseIterator": responses.ResponseIterator,
    "Tensor": tensor.Tensor,
    "TritonError": errors.TritonError,
    "TritonModelException": errors.TritonModelException,
    "TRITON_STRING_TO_NUMPY": types.TRITON_STRING_TO_NUMPY,
    "TRITONSERVER_MEMORY_CPU": MemoryType.TRITONSERVER_MEMORY_CPU,
    "TRITONSERVER_MEMORY_GPU": MemoryType.TRITONSERVER_MEMORY_GPU,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END": messages.FLAG_SEQUENCE_END,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START": messages.FLAG_SEQUENCE_START,
    "TRITONSERVER_REQUEST_RELEASE_ALL": messages.RELEASE_ALL,
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE": messages.RELEASE_RESCHEDULE,
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL": messages.RESPONSE_COMPLETE_FINAL,
    "deserialize_bytes_tensor": types.deserialize_bytes_tensor,
    "get_input_config_by_name": get_input_config_by_name,
    "get_input_tensor_by_name": get_input_tensor_by_name,
    "get_output_config_by_name": get_output_config_by_name,
    "get_output_tensor_by_name": get_output_tensor_by_name,
    "numpy_to_triton_type": types.numpy_to_triton_type,
    "serialize_byte_tensor": types.serialize_byte_tensor,
    "triton_string_to_numpy": types.triton_string_to_numpy,
    "triton_to_numpy_type": types.triton_to_numpy_type,
    "using_decoupled_model_transaction_policy": using_decoupled_model_transaction_policy,
}
