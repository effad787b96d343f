"""The descriptor index matches google's descriptor pool, without google's protobuf."""

from collections.abc import Iterator

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from support.protobuf import descriptor_set

from xlaserve.grpc.protobuf.descriptors import DescriptorIndex


@pytest.fixture(scope="module")
def contracts() -> DescriptorIndex:
    return DescriptorIndex.of_contracts()


def names(files: list[bytes]) -> list[str]:
    return [FileDescriptorProto.FromString(file).name for file in files]


def files_of(*files: FileDescriptorProto) -> bytes:
    return FileDescriptorSet(file=files).SerializeToString()


def symbols(file: FileDescriptorProto) -> Iterator[str]:
    for service in file.service:
        yield service.name
        yield from (f"{service.name}.{method.name}" for method in service.method)
    yield from (value for enum in file.enum_type for value in (enum.name, enum.value[0].name))
    for message in file.message_type:
        yield from symbols_in(message)


def symbols_in(message: DescriptorProto) -> Iterator[str]:
    inner = [field.name for field in message.field]
    inner += [oneof.name for oneof in message.oneof_decl]
    inner += [value for enum in message.enum_type for value in (enum.name, enum.value[0].name)]
    inner += [symbol for child in message.nested_type for symbol in symbols_in(child)]
    yield message.name
    yield from (f"{message.name}.{name}" for name in inner)


def test_files_are_the_bytes_of_the_compiler(contracts: DescriptorIndex) -> None:
    for file in descriptor_set().file:
        assert file.SerializeToString() == contracts.file_named(file.name)[0]


@pytest.mark.parametrize("file", descriptor_set().file, ids=lambda file: file.name)
def test_every_symbol_is_found_in_its_file(
    contracts: DescriptorIndex, file: FileDescriptorProto
) -> None:
    found = list(symbols(file))

    assert len(found) > 5
    for symbol in found:
        assert file.name == names(contracts.file_of(f"{file.package}.{symbol}"))[0]


def test_imports_follow_the_file_that_was_asked_for(contracts: DescriptorIndex) -> None:
    files = contracts.file_of("inference.GRPCInferenceService.ModelInfer")

    assert ["inference.proto", "model_config.proto"] == names(files)


def test_imports_come_once_each() -> None:
    """A diamond: two files import a third, and a fourth file imports all of them."""
    base = FileDescriptorProto(name="base.proto", package="p")
    left = FileDescriptorProto(name="left.proto", dependency=["base.proto"])
    right = FileDescriptorProto(name="right.proto", dependency=["base.proto", "left.proto"])
    top = FileDescriptorProto(name="top.proto", dependency=["left.proto", "right.proto"])

    found = names(DescriptorIndex([files_of(base, left, right, top)]).file_named("top.proto"))

    assert "top.proto" == found[0]
    assert ["base.proto", "left.proto", "right.proto", "top.proto"] == sorted(found)


@pytest.mark.parametrize("name", ["", "inference", "inference.Nothing", ".inference.DataType"])
def test_what_is_not_there_is_not_found(contracts: DescriptorIndex, name: str) -> None:
    assert [] == contracts.file_of(name)
    assert [] == contracts.file_named(name)
    assert not contracts.is_message(name)


def test_messages_are_told_from_other_symbols(contracts: DescriptorIndex) -> None:
    assert contracts.is_message("inference.ModelInferRequest.InferInputTensor")
    assert not contracts.is_message("inference.GRPCInferenceService")


def test_further_sets_are_added() -> None:
    plugin = FileDescriptorProto(name="echo.proto", dependency=["inference.proto"])
    plugin.service.add(name="Echo").method.add(name="Say")
    plugin.extension.add(name="extra")

    index = DescriptorIndex.of_contracts(files_of(plugin))

    expected = ["echo.proto", "inference.proto", "model_config.proto"]
    assert expected == names(index.file_of("Echo.Say"))
    assert expected == names(index.file_of("extra"))


def test_first_of_two_files_with_one_name_counts() -> None:
    """Two descriptor sets may both contain google/protobuf/empty.proto, from two compilers."""
    old, new = (FileDescriptorProto(name="a.proto", package=package) for package in ("old", "new"))

    index = DescriptorIndex([files_of(old), files_of(new)])

    assert [old.SerializeToString()] == index.file_named("a.proto")


def test_set_without_its_imports_is_refused() -> None:
    lonely = FileDescriptorProto(name="a.proto", dependency=["b.proto"])

    with pytest.raises(ValueError, match=r"the descriptor set lacks b\.proto, which a\.proto imp"):
        DescriptorIndex([files_of(lonely)])
