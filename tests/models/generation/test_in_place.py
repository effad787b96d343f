"""Memory that a compiled program reports, with lines that XLA writes for an H100."""

from typing import Any

import pytest

from xlaserve.errors import InvalidModel
from xlaserve.generation.in_place import Memory, check_aliasing, check_partial
from xlaserve.runtime.devices.workspace import workspace_bytes

CUBLAS = (
    "  %custom-call.6 = (f32[8,48]{1,0}, s8[4194304]{0}) custom-call(%a, %b), "
    'custom_call_target="__cublas$lt$matmul"'
)
CUBLAS_OF_HOPPER = CUBLAS.replace("4194304", "33554432")
CUDNN = (
    "  ROOT %conv.1 = (bf16[8,64,56,56]{3,2,1,0}, u8[16777216]{0}) custom-call(%x, %w), "
    'custom_call_target="__cudnn$convForward"'
)
NOTHING = '  %top.1 = (f32[8,20]{1,0}, s32[8,20]{1,0}) custom-call(%x), custom_call_target="TopK"'
BYTES_OF_THE_MODEL = "  %mask.1 = s8[99999999]{0} fusion(%x), kind=kLoop, calls=%fused"
QUANTIZED = '  %sum.1 = (s8[8,9999]{1,0}, s32[8]{0}) custom-call(%x), custom_call_target="Q"'


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], 0),
        ([NOTHING, BYTES_OF_THE_MODEL, QUANTIZED], 0),
        ([CUBLAS], 4 << 20),
        ([CUBLAS, CUBLAS_OF_HOPPER, CUBLAS], 32 << 20),
        ([CUDNN, NOTHING, CUBLAS], 16 << 20),
    ],
)
def test_the_largest_workspace_of_a_library_is_found(lines: list[str], expected: int) -> None:
    assert expected == workspace_bytes("\n".join(["HloModule jit_call", "", *lines]))


class _Compiled:
    def __init__(self, temporaries: int, text: str | None) -> None:
        self.alias_size_in_bytes = 8 << 20
        self.temp_size_in_bytes = temporaries
        self._text = text

    def memory_analysis(self) -> Any:
        return self

    def as_text(self) -> str | None:
        return self._text


@pytest.mark.parametrize("size", [4 << 20, 32 << 20])
def test_a_workspace_is_no_copy_of_a_small_cache(size: int) -> None:
    text = CUBLAS.replace("4194304", str(size))
    memory = Memory.of(_Compiled(size + 100, text))

    assert (8 << 20, size + 100, 100) == (memory.aliased, memory.temporaries, memory.of_model)
    check_aliasing("decode", memory, 1 << 20, 100)
    check_partial(memory, 1 << 20, 1 << 10, 100)


def test_a_copy_beside_a_workspace_is_one() -> None:
    memory = Memory.of(_Compiled((32 << 20) + (9 << 20), CUBLAS_OF_HOPPER))

    with pytest.raises(InvalidModel, match="expected at most 8388608 bytes .* got 9437184"):
        check_aliasing("decode", memory, 8 << 20, 100)
    with pytest.raises(InvalidModel, match="a step of fewer rows copies the cache"):
        check_partial(memory, 1 << 20, 1 << 10, 100)


@pytest.mark.parametrize("text", [None, "", NOTHING])
def test_all_counts_where_no_text_names_a_workspace(text: str | None) -> None:
    assert (5 << 20) == Memory.of(_Compiled(5 << 20, text)).of_model


def test_a_chunk_may_take_more() -> None:
    memory = Memory(aliased=1 << 20, temporaries=1 << 30)

    check_aliasing("chunk", memory, 1 << 20, None)
    with pytest.raises(InvalidModel, match="does not update the cache in place"):
        check_aliasing("chunk", memory, (1 << 20) + 1, None)
