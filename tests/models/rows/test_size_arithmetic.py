"""Values computed from the batch size, before shapes are refined."""

# Programs are not wrapped.
# ruff: noqa: E501

import pytest

from xlaserve.row_proofs import refining, size_arithmetic
from xlaserve.row_proofs.constants import MAX_ELEMENTS
from xlaserve.row_proofs.findings import Unfollowed
from xlaserve.row_proofs.size_arithmetic import question

SIZE = """

%n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<37x4xf32>) -> tensor<i32>
%c = stablehlo.constant dense<8> : tensor<i32>
"""
I32 = "tensor<i32>"


def asked(body: str) -> str:
    """Return the operation whose result two batch sizes do not determine; `%n` is the batch size."""
    text = (
        "func.func public @main(%x: tensor<37x4xf32>, %i: tensor<i32>) -> tensor<37x4xf32> {"
        f"{SIZE}{body}\nreturn %x : tensor<37x4xf32>\n}}"
    )
    with refining.parsing():
        found = question(refining.parse(text), [0])
    return found.operation if found is not None else ""


@pytest.mark.parametrize(
    "body",
    [
        f"%y = stablehlo.add %n, %c : {I32}",
        f"%y = stablehlo.multiply %n, %c : {I32}\n%z = stablehlo.divide %y, %c : {I32}",
        f"%y = stablehlo.multiply %n, %c : {I32}\n%z = stablehlo.remainder %y, %c : {I32}",
        f"%y = stablehlo.add %n, %c : {I32}\n%z = stablehlo.maximum %y, %n : {I32}",
        f"%y = stablehlo.minimum %n, %i : {I32}",
        f"%m = stablehlo.constant dense<2147483647> : {I32}\n%y = stablehlo.minimum %n, %m : {I32}",
        f"%m = stablehlo.constant dense<2147483647> : {I32}\n%y = stablehlo.minimum %m, %n : {I32}",
        "%r = stablehlo.reshape %n : (tensor<i32>) -> tensor<1x1xi32>\n"
        "%z = stablehlo.constant dense<0> : tensor<1x1xi32>\n"
        "%y = stablehlo.concatenate %r, %z, dim = 1 : (tensor<1x1xi32>, tensor<1x1xi32>) -> tensor<1x2xi32>",
        f"%y = stablehlo.compare LT, %i, %n, SIGNED : ({I32}, {I32}) -> tensor<i1>",
    ],
)
def test_what_two_sizes_determine_is_well(body: str) -> None:
    assert asked(body) == ""


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        ("divide", f"%y = stablehlo.divide %n, %c : {I32}"),
        ("remainder", f"%y = stablehlo.remainder %n, %c : {I32}"),
        ("minimum", f"%y = stablehlo.minimum %n, %c : {I32}"),
        (
            "minimum",
            f"%m = stablehlo.constant dense<2147483646> : {I32}\n%y = stablehlo.minimum %n, %m : {I32}",
        ),
        (
            "maximum",
            f"%m = stablehlo.constant dense<2147483647> : {I32}\n%y = stablehlo.maximum %n, %m : {I32}",
        ),
        ("maximum", f"%y = stablehlo.maximum %n, %c : {I32}"),
        ("multiply", f"%y = stablehlo.multiply %n, %n : {I32}"),
        ("clamp", f"%y = stablehlo.clamp %c, %n, %c : {I32}"),
        ("and", f"%y = stablehlo.and %n, %c : {I32}"),
        ("shift_left", f"%y = stablehlo.shift_left %n, %c : {I32}"),
        ("convert", f"%y = stablehlo.convert %n : ({I32}) -> tensor<bf16>"),
        ("convert", f"%y = stablehlo.convert %n : ({I32}) -> tensor<i8>"),
        ("compare", f"%y = stablehlo.compare GT, %n, %c, SIGNED : ({I32}, {I32}) -> tensor<i1>"),
        (
            "case",
            '%y = "stablehlo.case"(%n) ({ stablehlo.return %c : tensor<i32> }, '
            "{ stablehlo.return %i : tensor<i32> }) : (tensor<i32>) -> tensor<i32>",
        ),
        (
            "divide",
            '%y = "stablehlo.case"(%i) ({ stablehlo.return %c : tensor<i32> }, '
            "{ %q = stablehlo.divide %n, %c : tensor<i32> stablehlo.return %q : tensor<i32> }) "
            ": (tensor<i32>) -> tensor<i32>",
        ),
    ],
)
def test_what_two_sizes_do_not_determine_is_asked_about(operation: str, body: str) -> None:
    assert asked(body) == f"stablehlo.{operation}"


def test_functions_are_followed_to_their_ends() -> None:
    text = """
    func.func public @main(%x: tensor<37x4xf32>) -> tensor<i32> {
      %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<37x4xf32>) -> tensor<i32>
      %y = call @half(%n) : (tensor<i32>) -> tensor<i32>
      return %y : tensor<i32>
    }
    func.func private @half(%n: tensor<i32>) -> tensor<i32> {
      %c = stablehlo.constant dense<2> : tensor<i32>
      %y = stablehlo.divide %n, %c : tensor<i32>
      return %y : tensor<i32>
    }
    """
    with refining.parsing():
        found = question(refining.parse(text), [0])

    assert found is not None
    assert found.operation == "stablehlo.divide"


def test_a_function_that_calls_itself_is_not_followed() -> None:
    text = """
    func.func public @main(%x: tensor<37x4xf32>) -> tensor<37x4xf32> {
      %y = call @again(%x) : (tensor<37x4xf32>) -> tensor<37x4xf32>
      return %y : tensor<37x4xf32>
    }
    func.func private @again(%x: tensor<37x4xf32>) -> tensor<37x4xf32> {
      %y = call @again(%x) : (tensor<37x4xf32>) -> tensor<37x4xf32>
      return %y : tensor<37x4xf32>
    }
    """

    with refining.parsing(), pytest.raises(Unfollowed):
        question(refining.parse(text), [0])


SHAPE = """
%v = stablehlo.dynamic_reshape %x, %s : (tensor<37x4xf32>, tensor<1xi32>) -> tensor<?xf32>
%d = stablehlo.get_dimension_size %v, dim = 0 : (tensor<?xf32>) -> tensor<i32>
%e = stablehlo.reshape %d : (tensor<i32>) -> tensor<1xi32>
%f = stablehlo.constant dense<1.0> : tensor<f32>
"""


@pytest.mark.parametrize(
    ("body", "is_followed"),
    [
        (
            "%g = stablehlo.dynamic_broadcast_in_dim %f, %e, dims = [] : (tensor<f32>, tensor<1xi32>) -> tensor<?xf32>\n"
            "%h = stablehlo.add %v, %g : tensor<?xf32>",
            True,
        ),
        (
            "%g = stablehlo.dynamic_broadcast_in_dim %n, %e, dims = [] : (tensor<i32>, tensor<1xi32>) -> tensor<?xi32>",
            False,
        ),
        (
            "%g = stablehlo.dynamic_broadcast_in_dim %f, %e, dims = [] : (tensor<f32>, tensor<1xi32>) -> tensor<?xf32>\n"
            "%h = stablehlo.bitcast_convert %g : (tensor<?xf32>) -> tensor<?xi32>",
            True,
        ),
        (
            "%g = stablehlo.dynamic_broadcast_in_dim %f, %e, dims = [] : (tensor<f32>, tensor<1xi32>) -> tensor<?xf32>\n"
            "%h = stablehlo.bitcast_convert %g : (tensor<?xf32>) -> tensor<?x4xi8>",
            False,
        ),
        ("%g = stablehlo.dynamic_iota %e, dim = 0 : (tensor<1xi32>) -> tensor<?xf32>", False),
        ("%g = stablehlo.minimum %d, %i : tensor<i32>", False),
        ("%g = stablehlo.and %e, %e : tensor<1xi32>\n%h = stablehlo.slice %g [0:1] : (tensor<1xi32>) -> tensor<1xi32>", False),
    ],
)  # fmt: skip
def test_the_size_of_something_computed_only_makes_constants_of_its_shape(
    body: str, is_followed: bool
) -> None:
    shape = "%r = stablehlo.reshape %i : (tensor<i32>) -> tensor<1xi32>\n"
    whole = shape + SHAPE.replace("%s", "%r", 1) + body

    if is_followed:
        assert asked(whole) == ""
    else:
        with pytest.raises(Unfollowed):
            asked(whole)


@pytest.mark.parametrize(
    ("output", "operation"), [(0, ""), (1, "stablehlo.divide"), (None, "stablehlo.divide")]
)
def test_what_another_output_is_computed_from_prevents_no_proof(
    output: int | None, operation: str
) -> None:
    text = (
        "func.func public @main(%x: tensor<37x4xf32>) -> (tensor<37x4xf32>, tensor<i32>) {"
        f"{SIZE}%y:2 = call @both(%x, %n) : (tensor<37x4xf32>, {I32}) -> (tensor<37x4xf32>, {I32})\n"
        f"return %y#0, %y#1 : tensor<37x4xf32>, {I32}\n}}\n"
        f"func.func private @both(%x: tensor<37x4xf32>, %n: {I32}) -> (tensor<37x4xf32>, {I32}) {{\n"
        f"%c = stablehlo.constant dense<8> : {I32}\n"
        f"%q = stablehlo.divide %n, %c : {I32}\n"
        "%t = stablehlo.tanh %x : tensor<37x4xf32>\n"
        f"return %t, %q : tensor<37x4xf32>, {I32}\n}}"
    )
    with refining.parsing():
        found = question(refining.parse(text), [0], output)

    assert operation == (found.operation if found is not None else "")


def nested(depth: int) -> str:
    """Return a module with this many nested branches."""
    inside = "stablehlo.return %x : tensor<4xf32>"
    for number in range(depth):
        inside = (
            f'%b{number} = "stablehlo.if"(%p) ({{\n{inside}\n}}, {{\n'
            f"stablehlo.return %x : tensor<4xf32>\n}}) : (tensor<i1>) -> tensor<4xf32>\n"
            f"stablehlo.return %b{number} : tensor<4xf32>"
        )
    body = inside.replace(f"stablehlo.return %b{depth - 1} ", f"return %b{depth - 1} ")
    return (
        "func.func public @main(%p: tensor<i1>, %x: tensor<4xf32>) -> tensor<4xf32> {\n"
        + body
        + "\n}"
    )


@pytest.mark.parametrize(("depth", "is_followed"), [(48, True), (49, False)])
def test_branches_are_followed_up_to_a_depth(depth: int, is_followed: bool) -> None:
    with refining.parsing():
        module = refining.parse(nested(depth))
        if is_followed:
            assert question(module, ()) is None
        else:
            with pytest.raises(Unfollowed, match="nested too deeply"):
                question(module, ())


V2 = "tensor<2xi32>"
PAIR = f"""
%a = stablehlo.reshape %n : ({I32}) -> tensor<1xi32>
%b = stablehlo.reshape %c : ({I32}) -> tensor<1xi32>
%v = stablehlo.concatenate %a, %b, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> {V2}
"""
EIGHTS = f"%e = stablehlo.constant dense<[8, 4]> : {V2}\n"
GATHER = (
    "#stablehlo.gather<collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = %s>"
)


def one_of(operation: str, kind: str = "tensor<1xi32>") -> str:
    return f"{operation}\n%h = stablehlo.constant dense<8> : {kind}\n%y = stablehlo.divide %w, %h : {kind}"


def gathered(indices: str, kind: str, result: str, dim: int) -> str:
    return (
        f"%i0 = stablehlo.constant {indices} : {kind}\n"
        f'%w = "stablehlo.gather"(%v, %i0) {{dimension_numbers = {GATHER % dim}, '
        f"slice_sizes = array<i64: 1>}} : ({V2}, {kind}) -> {result}"
    )


WHOLE = (
    "#stablehlo.gather<collapsed_slice_dims = [0, 1], start_index_map = [0], index_vector_dim = 0>"
)


def looked_up(operand: str, kind: str, index: str, numbers: str) -> str:
    """Look up an element by an index, which is 1 or the batch size."""
    slices = ", ".join("1" * (kind.count("x")))
    return (
        "%o = stablehlo.constant dense<1> : tensor<1xi32>\n"
        f"%q = stablehlo.reshape %v : ({V2}) -> tensor<2x1xi32>\n"
        f'%t = "stablehlo.gather"({operand}, {index}) {{dimension_numbers = {numbers}, '
        f"slice_sizes = array<i64: {slices}>}} : ({kind}, tensor<1xi32>) -> RESULT\n"
        "%w = stablehlo.reshape %t : (RESULT) -> tensor<1xi32>"
    ).replace("RESULT", I32 if numbers == WHOLE else "tensor<1xi32>")


@pytest.mark.parametrize(
    ("body", "operation"),
    [
        # The batch size is the first element, 8 the second.
        (one_of(f"%w = stablehlo.slice %v [0:1] : ({V2}) -> tensor<1xi32>"), "divide"),
        (one_of(f"%w = stablehlo.slice %v [1:2] : ({V2}) -> tensor<1xi32>"), ""),
        (one_of(f"%w = stablehlo.slice %v [0:2:2] : ({V2}) -> tensor<1xi32>"), "divide"),
        (one_of(gathered("dense<0>", "tensor<1xi32>", "tensor<1xi32>", 1), "tensor<1xi32>"), "divide"),
        (one_of(gathered("dense<1>", "tensor<1xi32>", "tensor<1xi32>", 1), "tensor<1xi32>"), ""),
        (one_of(gathered("dense<9>", "tensor<1xi32>", "tensor<1xi32>", 1), "tensor<1xi32>"), ""),
        (one_of(gathered("dense<-3>", "tensor<1xi32>", "tensor<1xi32>", 1), "tensor<1xi32>"), "divide"),
        (one_of(gathered("dense<[1, 0]>", V2, V2, 1), V2), "divide"),
        # An element looked up at the batch size is unknown.
        (one_of(looked_up("%v", V2, "%a", GATHER % 1)), "gather"),
        (one_of(looked_up("%v", V2, "%o", GATHER % 1)), ""),
        (one_of(looked_up("%q", "tensor<2x1xi32>", "%o", WHOLE)), "gather"),
        (one_of(gathered("dense<[1, 1]>", V2, V2, 1), V2), ""),
        (EIGHTS + f"%y = stablehlo.add %e, %v : {V2}", ""),
        (EIGHTS + f"%y = stablehlo.divide %v, %e : {V2}", "divide"),
        (one_of(f"%w = stablehlo.reshape %v : ({V2}) -> tensor<2x1xi32>", "tensor<2x1xi32>"), "divide"),
        (
            f"%r = stablehlo.broadcast_in_dim %v, dims = [1] : ({V2}) -> tensor<3x2xi32>\n"
            "%w = stablehlo.slice %r [0:3, 1:2] : (tensor<3x2xi32>) -> tensor<3x1xi32>\n"
            "%h = stablehlo.constant dense<8> : tensor<3x1xi32>\n"
            "%y = stablehlo.divide %w, %h : tensor<3x1xi32>",
            "",
        ),
        (
            f"%r = stablehlo.broadcast_in_dim %v, dims = [0] : ({V2}) -> tensor<2x3xi32>\n"
            "%w = stablehlo.slice %r [1:2, 0:3] : (tensor<2x3xi32>) -> tensor<1x3xi32>\n"
            "%h = stablehlo.constant dense<8> : tensor<1x3xi32>\n"
            "%y = stablehlo.divide %w, %h : tensor<1x3xi32>",
            "",
        ),
        (
            f"%r = stablehlo.broadcast_in_dim %v, dims = [0] : ({V2}) -> tensor<2x3xi32>\n"
            "%w = stablehlo.slice %r [0:1, 0:3] : (tensor<2x3xi32>) -> tensor<1x3xi32>\n"
            "%h = stablehlo.constant dense<8> : tensor<1x3xi32>\n"
            "%y = stablehlo.divide %w, %h : tensor<1x3xi32>",
            "divide",
        ),
    ],
)  # fmt: skip
def test_known_integers_are_moved_as_they_would_be(body: str, operation: str) -> None:
    assert asked(PAIR + body) == (operation and f"stablehlo.{operation}")


@pytest.mark.parametrize(
    ("count", "operation"),
    [(MAX_ELEMENTS // 2, ""), (MAX_ELEMENTS // 2 + 1, "broadcast_in_dim")],
)
def test_integers_are_known_up_to_a_number_of_elements(count: int, operation: str) -> None:
    """All integers are copied, so their number is limited."""
    body = (
        f"%r = stablehlo.broadcast_in_dim %v, dims = [0] : ({V2}) -> tensor<2x{count}xi32>\n"
        f"%t = stablehlo.slice %r [1:2, 0:1] : (tensor<2x{count}xi32>) -> tensor<1x1xi32>\n"
        "%w = stablehlo.reshape %t : (tensor<1x1xi32>) -> tensor<1xi32>"
    )

    assert asked(PAIR + one_of(body)) == (operation and f"stablehlo.{operation}")


@pytest.mark.parametrize(("predicate", "operation"), [("true", ""), ("false", "divide")])
def test_a_branch_that_is_never_taken_asks_nothing(predicate: str, operation: str) -> None:
    body = (
        f"%p = stablehlo.constant dense<{predicate}> : tensor<i1>\n"
        '%y = "stablehlo.if"(%p) ({ stablehlo.return %c : tensor<i32> }, '
        "{ %q = stablehlo.divide %n, %c : tensor<i32> stablehlo.return %q : tensor<i32> }) "
        ": (tensor<i1>) -> tensor<i32>"
    )

    assert asked(body) == (operation and f"stablehlo.{operation}")


def test_a_program_of_too_many_operations_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The operations that are always present, and one more.
    monkeypatch.setattr(size_arithmetic, "MAX_STEPS", 3)
    asked("")

    with pytest.raises(Unfollowed, match="more than 3 operations"):
        asked(f"%y = stablehlo.add %n, %c : {I32}")
