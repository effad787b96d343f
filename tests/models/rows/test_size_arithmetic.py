"""What is made of the size of the batch, before shapes are refined."""

# The programs are as long as they are.
# ruff: noqa: E501

import pytest

from xlaserve.models.rows import refining
from xlaserve.models.rows.findings import Unfollowed
from xlaserve.models.rows.size_arithmetic import question

SIZE = """

%n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<37x4xf32>) -> tensor<i32>
%c = stablehlo.constant dense<8> : tensor<i32>
"""
I32 = "tensor<i32>"


def asked(body: str) -> str:
    """Return the operation that two sizes do not determine; the batch is `%n`."""
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
    """Return a module of so many branches inside one another."""
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
