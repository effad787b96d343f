"""Google's protobuf classes for the codec's messages, as a reference for the codec."""
# ruff: noqa: RUF009 - betterproto describes the fields of a message by default values

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from importlib import import_module, resources
from typing import Any

import betterproto
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

MODULES = {
    "inference": "xlaserve_proto.inference",
    "mmesh": "xlaserve_proto.mmesh",
    "grpc.health.v1": "xlaserve_proto.grpc.health.v1",
    "grpc.reflection.v1": "xlaserve_proto.grpc.reflection.v1",
    "grpc.reflection.v1alpha": "xlaserve_proto.grpc.reflection.v1alpha",
}
"""Protobuf package -> module of its generated classes."""

_FIELD = descriptor_pb2.FieldDescriptorProto

DISPUTED = (
    "a size has more than five bytes",
    "a field of a group has the number 0",
)
"""Errors that only some versions of Google's protobuf report."""


class Colour(betterproto.Enum):
    """An enum with a negative number and gaps."""

    UNKNOWN = 0
    RED = 1
    GREEN = 7
    ULTRAVIOLET = -3


@dataclass(eq=False, repr=False)
class Everything(betterproto.Message):
    """Every field type in every form: singular, repeated, optional, map, oneof, and recursive."""

    int32: int = betterproto.int32_field(1)
    int64: int = betterproto.int64_field(2)
    uint32: int = betterproto.uint32_field(3)
    uint64: int = betterproto.uint64_field(4)
    sint32: int = betterproto.sint32_field(5)
    sint64: int = betterproto.sint64_field(6)
    fixed32: int = betterproto.fixed32_field(7)
    fixed64: int = betterproto.fixed64_field(8)
    sfixed32: int = betterproto.sfixed32_field(9)
    sfixed64: int = betterproto.sfixed64_field(10)
    float32: float = betterproto.float_field(11)
    float64: float = betterproto.double_field(12)
    boolean: bool = betterproto.bool_field(13)
    text: str = betterproto.string_field(14)
    blob: bytes = betterproto.bytes_field(15)
    colour: "Colour" = betterproto.enum_field(16)
    child: "Everything" = betterproto.message_field(17)

    int32s: list[int] = betterproto.int32_field(21)
    int64s: list[int] = betterproto.int64_field(22)
    uint32s: list[int] = betterproto.uint32_field(23)
    uint64s: list[int] = betterproto.uint64_field(24)
    sint32s: list[int] = betterproto.sint32_field(25)
    sint64s: list[int] = betterproto.sint64_field(26)
    fixed32s: list[int] = betterproto.fixed32_field(27)
    fixed64s: list[int] = betterproto.fixed64_field(28)
    sfixed32s: list[int] = betterproto.sfixed32_field(29)
    sfixed64s: list[int] = betterproto.sfixed64_field(30)
    float32s: list[float] = betterproto.float_field(31)
    float64s: list[float] = betterproto.double_field(32)
    booleans: list[bool] = betterproto.bool_field(33)
    texts: list[str] = betterproto.string_field(34)
    blobs: list[bytes] = betterproto.bytes_field(35)
    colours: list["Colour"] = betterproto.enum_field(36)
    children: list["Everything"] = betterproto.message_field(37)

    maybe_int32: int | None = betterproto.int32_field(41, optional=True)
    maybe_float64: float | None = betterproto.double_field(42, optional=True)
    maybe_boolean: bool | None = betterproto.bool_field(43, optional=True)
    maybe_text: str | None = betterproto.string_field(44, optional=True)
    maybe_colour: "Colour | None" = betterproto.enum_field(45, optional=True)

    by_text: dict[str, bytes] = betterproto.map_field(
        51, betterproto.TYPE_STRING, betterproto.TYPE_BYTES
    )
    by_int32: dict[int, float] = betterproto.map_field(
        52, betterproto.TYPE_INT32, betterproto.TYPE_DOUBLE
    )
    by_uint64: dict[int, "Colour"] = betterproto.map_field(
        53, betterproto.TYPE_UINT64, betterproto.TYPE_ENUM
    )
    by_boolean: dict[bool, "Everything"] = betterproto.map_field(
        54, betterproto.TYPE_BOOL, betterproto.TYPE_MESSAGE
    )
    by_sint64: dict[int, str] = betterproto.map_field(
        55, betterproto.TYPE_SINT64, betterproto.TYPE_STRING
    )
    by_sfixed32: dict[int, bool] = betterproto.map_field(
        56, betterproto.TYPE_SFIXED32, betterproto.TYPE_BOOL
    )

    chosen_int64: int = betterproto.int64_field(61, group="choice")
    chosen_text: str = betterproto.string_field(62, group="choice")
    chosen_child: "Everything" = betterproto.message_field(63, group="choice")
    chosen_other: "Everything" = betterproto.message_field(64, group="choice")
    chosen_float32: float = betterproto.float_field(65, group="choice")


def everything(**values: Any) -> Everything:
    """Create a message from any field values."""
    return Everything(**values)


class Google:
    """Google's message classes, in their own descriptor pool."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in descriptor_set().file:
            self._pool.Add(file)
        self._pool.Add(_file_of_everything())
        self._classes: dict[type[betterproto.Message], type[Message]] = {
            Everything: self.named("support.Everything")
        }
        for name, ours in contract_messages():
            self._classes[ours] = self.named(name)

    def __call__(self, ours: type[betterproto.Message]) -> type[Message]:
        """Return Google's class for a generated class."""
        return self._classes[ours]

    def named(self, name: str) -> type[Message]:
        """Return Google's class for a full message name."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))


def descriptor_set() -> descriptor_pb2.FileDescriptorSet:
    """Return protoc's descriptors of the contracts."""
    data = resources.files("xlaserve_proto").joinpath("descriptor_set.binpb").read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(data)


def contract_messages() -> Iterator[tuple[str, type[betterproto.Message]]]:
    """Yield every message of the contracts, including nested ones, with its generated class."""
    for file in descriptor_set().file:
        module = import_module(MODULES[file.package])
        for path in _messages("", file.message_type):
            yield f"{file.package}.{path}", getattr(module, path.replace(".", ""))


def exchanged_messages() -> list[type[betterproto.Message]]:
    """Return the request and response classes of all methods of the contracts."""
    ours = dict(contract_messages())
    names = {
        name.removeprefix(".")
        for file in descriptor_set().file
        for service in file.service
        for method in service.method
        for name in (method.input_type, method.output_type)
    }
    return [ours[name] for name in sorted(names)]


def _messages(prefix: str, descriptors: Iterable[Any]) -> Iterator[str]:
    for descriptor in descriptors:
        if not descriptor.options.map_entry:
            yield prefix + descriptor.name
            yield from _messages(f"{prefix}{descriptor.name}.", descriptor.nested_type)


# --- Descriptor of Everything --------------------------------------------------------------------


def _file_of_everything() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="everything.proto", package="support", syntax="proto3"
    )
    colour = file.enum_type.add(name="Colour")
    for member in Colour:
        colour.value.add(name=str(member.name), number=int(member))
    everything = file.message_type.add(name="Everything")
    everything.oneof_decl.add(name="choice")
    for field in fields(Everything):
        _add_field(everything, field.name, field.metadata["betterproto"], str(field.type))
    return file


def _add_field(
    everything: descriptor_pb2.DescriptorProto,
    name: str,
    meta: betterproto.FieldMetadata,
    annotation: str,
) -> None:
    field = everything.field.add(name=name, number=meta.number)
    repeated = meta.proto_type == "map" or annotation.startswith("list")
    field.label = _FIELD.LABEL_REPEATED if repeated else _FIELD.LABEL_OPTIONAL
    if meta.group:
        field.oneof_index = 0
    if meta.optional:
        field.proto3_optional = True
        field.oneof_index = len(everything.oneof_decl)
        everything.oneof_decl.add(name=f"_{name}")
    if meta.map_types is None:
        _set_type(field, meta.proto_type)
        return
    entry = everything.nested_type.add(name=_entry_name(name))
    entry.options.map_entry = True
    for number, (part, kind) in enumerate(zip(("key", "value"), meta.map_types, strict=True), 1):
        row = entry.field.add(name=part, number=number, label=_FIELD.LABEL_OPTIONAL)
        _set_type(row, kind)
    field.type = _FIELD.TYPE_MESSAGE
    field.type_name = f".support.Everything.{entry.name}"


def _entry_name(field: str) -> str:
    return "".join(part.capitalize() for part in field.split("_")) + "Entry"


def _set_type(field: Any, kind: str) -> None:
    field.type = _FIELD.Type.Value(f"TYPE_{kind.upper()}")
    if kind in ("enum", "message"):
        field.type_name = ".support.Colour" if kind == "enum" else ".support.Everything"
