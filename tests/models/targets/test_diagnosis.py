"""Verbatim messages of JAX 0.12 and of the compilers of CUDA 12 and libtpu."""

import pytest

from xlaserve.offline.targets.child import problem_of
from xlaserve.offline.targets.jobs import Problem

_REWRITING = (
    "UNIMPLEMENTED: While rewriting computation to not contain X{64|128} element types, XLA "
    "encountered an HLO for which this rewriting is not implemented: %dot_general.1 = "
    "s64[64,64]{1,0} dot(%convert_element_type.2, %convert_element_type.3), "
    'metadata={op_name="jit(i64dot)/dot_general" stack_frame_id=2}'
)
_PLACE = """\n\t\n\nSuspected Python Code Location:
  /home/a/model.py:25:22 [i64dot]
  /home/a/model.py:33:8 [<module>] [xla::PythonStackTrace='']"""


@pytest.mark.parametrize(
    ("text", "operation", "location"),
    [
        ("MLIR translation rule for primitive 'eig' not found for platform tpu", "eig", ""),
        (
            "NOT_FOUND: No FFI handler registered for lapack_sgees_ffi on a platform CUDA "
            "(canonical cuda)",
            "lapack_sgees_ffi",
            "",
        ),
        (
            "INVALID_ARGUMENT: Custom emitter for lapack_sgees_ffi not found" + _PLACE,
            "lapack_sgees_ffi",
            "/home/a/model.py:25",
        ),
        (_REWRITING + _PLACE, "dot", "/home/a/model.py:25"),
        (
            "INVALID_ARGUMENT: during context [pre-optimization]: Unexpected operand type for FFT: "
            "c128[64,64]{1,0}\n\t\n\nSuspected Python Code Location:\n  <no source information>",
            "FFT",
            "",
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (33.00G) exceeds available HBM (15.75G).",
            "",
            "",
        ),
    ],
)
def test_the_operation_and_the_line_are_found(text: str, operation: str, location: str) -> None:
    found = problem_of(RuntimeError(text))

    assert (operation, location) == (found.operation, found.location)
    assert text.startswith(found.reason.removesuffix("..."))
    assert "\n" not in found.reason
    assert len(found.reason) <= 303


def test_an_error_without_a_text_has_a_name() -> None:
    assert Problem("ValueError") == problem_of(ValueError())
