"""Index of protobuf file descriptors by file name and symbol, for server reflection."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Self

import betterproto
from betterproto.lib.google.protobuf import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorProto,
)

from xlaserve.grpc.protobuf.codec import WireCodec

_UNBOUNDED = 1 << 62


@dataclass(eq=False, repr=False)
class _RawDescriptorSet(betterproto.Message):
    """`google.protobuf.FileDescriptorSet` with the files left serialized."""

    file: list[bytes] = betterproto.bytes_field(1)  # noqa: RUF009 - betterproto's way


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    serialized: bytes
    imports: tuple[str, ...]
    messages: frozenset[str]
    symbols: frozenset[str]
    """All symbols defined in the file, including messages."""


class DescriptorIndex:
    """Finds serialized file descriptors by file name and by the symbols they define.

    If two files have the same name, the first one is used. Raises ValueError if an imported file
    is missing from the sets; protoc includes imports with `--include_imports`.
    """

    def __init__(self, descriptor_sets: Iterable[bytes]) -> None:
        self._files: dict[str, _File] = {}
        self._file_of: dict[str, str] = {}
        self._messages: set[str] = set()
        for descriptor_set in descriptor_sets:
            for file in _files_of(descriptor_set):
                self._add(file)
        self._check_imports()

    @classmethod
    def of_contracts(cls, *further: bytes) -> Self:
        """Return an index of the server's own services and further descriptor sets."""
        contracts = resources.files("xlaserve_proto").joinpath("descriptor_set.binpb").read_bytes()
        return cls([contracts, *further])

    def file_named(self, name: str) -> list[bytes]:
        """Return a file, followed by its transitive imports; [] if the name is unknown."""
        found: dict[str, bytes] = {}
        wanted = [name] if name in self._files else []
        while wanted:
            current = wanted.pop()
            if current not in found:
                found[current] = self._files[current].serialized
                wanted += self._files[current].imports
        return list(found.values())

    def file_of(self, symbol: str) -> list[bytes]:
        """Return the file that defines a symbol, followed by its imports; [] if none does.

        Symbols are the full names of services, methods, messages, fields, oneofs, enums, enum
        values and extensions.
        """
        return self.file_named(self._file_of.get(symbol, ""))

    def is_message(self, name: str) -> bool:
        """Tell whether `name` is the full name of a message."""
        return name in self._messages

    def _add(self, file: _File) -> None:
        if file.name in self._files:
            return
        self._files[file.name] = file
        self._messages |= file.messages
        self._file_of |= dict.fromkeys(file.symbols, file.name)

    def _check_imports(self) -> None:
        for name, file in self._files.items():
            for imported in file.imports:
                if imported not in self._files:
                    raise ValueError(f"the descriptor set lacks {imported}, which {name} imports")


# Cached because parsing takes most of the startup time without models; tests start many servers.
@lru_cache(maxsize=4)
def _files_of(descriptor_set: bytes) -> tuple[_File, ...]:
    """Return the files of a descriptor set, in order."""
    codec = WireCodec(max_fields=_UNBOUNDED)
    files = []
    for serialized in codec.decode_message(_RawDescriptorSet, descriptor_set).file:
        read = codec.decode_message(FileDescriptorProto, serialized)
        scope = f"{read.package}." if read.package else ""
        files.append(
            _File(
                read.name,
                serialized,
                tuple(read.dependency),
                frozenset(_messages(scope, read.message_type)),
                frozenset(_symbols(scope, read)),
            )
        )
    return tuple(files)


def _messages(scope: str, messages: Iterable[DescriptorProto]) -> Iterator[str]:
    for message in messages:
        yield scope + message.name
        yield from _messages(f"{scope}{message.name}.", message.nested_type)


def _symbols(scope: str, file: FileDescriptorProto) -> Iterator[str]:
    for service in file.service:
        yield scope + service.name
        yield from (f"{scope}{service.name}.{method.name}" for method in service.method)
    yield from (scope + extension.name for extension in file.extension)
    yield from _enum_symbols(scope, file.enum_type)
    yield from _message_symbols(scope, file.message_type)


def _message_symbols(scope: str, messages: Iterable[DescriptorProto]) -> Iterator[str]:
    for message in messages:
        inner = f"{scope}{message.name}."
        yield scope + message.name
        yield from (inner + field.name for field in message.field)
        yield from (inner + oneof.name for oneof in message.oneof_decl)
        yield from (inner + extension.name for extension in message.extension)
        yield from _enum_symbols(inner, message.enum_type)
        yield from _message_symbols(inner, message.nested_type)


def _enum_symbols(scope: str, enums: Iterable[EnumDescriptorProto]) -> Iterator[str]:
    # As in C++, enum values belong to the scope that contains the enum.
    for enum in enums:
        yield scope + enum.name
        yield from (scope + value.name for value in enum.value)
