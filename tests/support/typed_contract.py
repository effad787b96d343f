"""Client message classes for the V2 contract without raw fields, as MLServer documents it.

Such a client finds the elements of tensors only in `contents`.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_CONTRACT = """
InferParameter
  1 bool bool_param
  2 int64 int64_param
  3 string string_param
InferTensorContents
  1 repeated bool bool_contents
  2 repeated int32 int_contents
  3 repeated int64 int64_contents
  4 repeated uint32 uint_contents
  5 repeated uint64 uint64_contents
  6 repeated float fp32_contents
  7 repeated double fp64_contents
  8 repeated bytes bytes_contents
InferInputTensor
  1 string name
  2 string datatype
  3 repeated int64 shape
  5 InferTensorContents contents
InferRequestedOutputTensor
  1 string name
InferOutputTensor
  1 string name
  2 string datatype
  3 repeated int64 shape
  5 InferTensorContents contents
ModelInferRequest
  1 string model_name
  2 string model_version
  3 string id
  5 repeated InferInputTensor inputs
  6 repeated InferRequestedOutputTensor outputs
ModelInferResponse
  1 string model_name
  2 string model_version
  3 string id
  5 repeated InferOutputTensor outputs
"""
"""Messages and their fields; maps of parameters are omitted."""

_FIELD = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "contract"


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="contract.proto", package=_PACKAGE, syntax="proto3"
    )
    for line in _CONTRACT.strip().splitlines():
        if not line.startswith(" "):
            file.message_type.add(name=line)
            continue
        number, *words = line.split()
        kind, name = words[-2:]
        field = file.message_type[-1].field.add(name=name, number=int(number))
        field.label = _FIELD.LABEL_REPEATED if "repeated" in words else _FIELD.LABEL_OPTIONAL
        if kind[0].isupper():
            field.type = _FIELD.TYPE_MESSAGE
            field.type_name = f".{_PACKAGE}.{kind}"
        else:
            field.type = _FIELD.Type.Value(f"TYPE_{kind.upper()}")
    return file


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())

ModelInferRequest = _message("ModelInferRequest")
ModelInferResponse = _message("ModelInferResponse")
