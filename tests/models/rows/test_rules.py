"""Rules on StableHLO programs, most of which JAX would not write for a symbolic batch."""

# Programs are not wrapped.
# ruff: noqa: E501

import pytest
from support.row_texts import verdict_of

from xlaserve.row_proofs import Independence, program

PROVED, UNKNOWN = Independence.PROVED, Independence.UNKNOWN
SUM = "({ ^bb0(%l: tensor<f32>, %r: tensor<f32>): %s = stablehlo.add %l, %r : tensor<f32> stablehlo.return %s : tensor<f32> })"
ROW = "%x: tensor<Bx4xf32>"
SAME = "tensor<Bx4xf32>"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"%y = stablehlo.reverse %x, dims = [0] : {SAME}", UNKNOWN),
        (f"%y = stablehlo.reverse %x, dims = [1] : {SAME}", PROVED),
        (
            '%k = stablehlo.constant dense<0> : tensor<2xui64>\n'
            '%s, %b = stablehlo.rng_bit_generator %k, algorithm = THREE_FRY : (tensor<2xui64>) -> '
            '(tensor<2xui64>, tensor<Bx4xui32>)\n'
            f'%f = stablehlo.convert %b : (tensor<Bx4xui32>) -> {SAME}\n'
            f'%y = stablehlo.add %x, %f : {SAME}',
            UNKNOWN,
        ),
        (
            '%k = stablehlo.constant dense<0> : tensor<2xui64>\n'
            '%s, %b = stablehlo.rng_bit_generator %k, algorithm = THREE_FRY : (tensor<2xui64>) -> '
            '(tensor<2xui64>, tensor<4xui32>)\n'
            '%f = stablehlo.convert %b : (tensor<4xui32>) -> tensor<4xf32>\n'
            f'%g = stablehlo.broadcast_in_dim %f, dims = [1] : (tensor<4xf32>) -> {SAME}\n'
            f'%y = stablehlo.add %x, %g : {SAME}',
            PROVED,
        ),
        (
            # The first of as many random bits as there are rows differs for every batch size.
            "%k = stablehlo.constant dense<0> : tensor<2xui64>\n"
            "%s, %b = stablehlo.rng_bit_generator %k, algorithm = THREE_FRY : (tensor<2xui64>) -> "
            "(tensor<2xui64>, tensor<Bxui32>)\n"
            "%c = stablehlo.slice %b [0:1] : (tensor<Bxui32>) -> tensor<1xui32>\n"
            "%f = stablehlo.convert %c : (tensor<1xui32>) -> tensor<1xf32>\n"
            f"%g = stablehlo.broadcast_in_dim %f, dims = [1] : (tensor<1xf32>) -> {SAME}\n"
            f"%y = stablehlo.add %x, %g : {SAME}",
            UNKNOWN,
        ),
        (
            "%i = stablehlo.iota dim = 1 : tensor<4xBxf32>\n"
            "%r = stablehlo.reshape %i : (tensor<4xBxf32>) -> tensor<Bx4xf32>\n"
            f"%y = stablehlo.add %x, %r : {SAME}",
            UNKNOWN,
        ),
        (
            # A counter over time and rows, reshaped: the result depends on the batch size.
            "%i = stablehlo.iota dim = 0 : tensor<4Bxf32>\n"
            "%r = stablehlo.reshape %i : (tensor<4Bxf32>) -> tensor<4xBxf32>\n"
            "%c = stablehlo.slice %r [0:4, 0:1] : (tensor<4xBxf32>) -> tensor<4x1xf32>\n"
            "%f = stablehlo.reshape %c : (tensor<4x1xf32>) -> tensor<4xf32>\n"
            f"%g = stablehlo.broadcast_in_dim %f, dims = [1] : (tensor<4xf32>) -> {SAME}\n"
            f"%y = stablehlo.add %x, %g : {SAME}",
            UNKNOWN,
        ),
        (
            "%i = stablehlo.iota dim = 0 : tensor<4xBxf32>\n"
            "%r = stablehlo.reshape %i : (tensor<4xBxf32>) -> tensor<4Bxf32>\n"
            "%c = stablehlo.slice %r [20:24] : (tensor<4Bxf32>) -> tensor<4xf32>\n"
            f"%g = stablehlo.broadcast_in_dim %c, dims = [1] : (tensor<4xf32>) -> {SAME}\n"
            f"%y = stablehlo.add %x, %g : {SAME}",
            UNKNOWN,
        ),
        (
            # One counter by time and one by row, added as if their elements corresponded.
            "%i = stablehlo.iota dim = 0 : tensor<4xBxf32>\n"
            "%a = stablehlo.reshape %i : (tensor<4xBxf32>) -> tensor<4Bxf32>\n"
            "%j = stablehlo.iota dim = 0 : tensor<Bx4xf32>\n"
            "%b = stablehlo.reshape %j : (tensor<Bx4xf32>) -> tensor<4Bxf32>\n"
            "%s = stablehlo.add %a, %b : tensor<4Bxf32>\n"
            "%c = stablehlo.slice %s [20:24] : (tensor<4Bxf32>) -> tensor<4xf32>\n"
            f"%g = stablehlo.broadcast_in_dim %c, dims = [1] : (tensor<4xf32>) -> {SAME}\n"
            f"%y = stablehlo.add %x, %g : {SAME}",
            UNKNOWN,
        ),
        (
            "%i = stablehlo.iota dim = 0 : tensor<Bxf32>\n"
            "%r = stablehlo.reverse %i, dims = [0] : tensor<Bxf32>\n"
            "%c = stablehlo.slice %r [0:1] : (tensor<Bxf32>) -> tensor<1xf32>\n"
            f"%g = stablehlo.broadcast_in_dim %c, dims = [1] : (tensor<1xf32>) -> {SAME}\n"
            f"%y = stablehlo.add %x, %g : {SAME}",
            UNKNOWN,
        ),
        (
            "%i = stablehlo.iota dim = 0 : tensor<Bxf32>\n"
            "%j = stablehlo.concatenate %i, %i, dim = 0 : (tensor<Bxf32>, tensor<Bxf32>) -> tensor<2Bxf32>\n"
            "%c = stablehlo.slice %j [33:37] : (tensor<2Bxf32>) -> tensor<4xf32>\n"
            f"%g = stablehlo.broadcast_in_dim %c, dims = [1] : (tensor<4xf32>) -> {SAME}\n"
            f"%y = stablehlo.add %x, %g : {SAME}",
            UNKNOWN,
        ),
        (
            "%i = stablehlo.iota dim = 0 : tensor<Bxi32>\n"
            "%n = stablehlo.constant dense<50> : tensor<1xi32>\n"
            '%t = "stablehlo.gather"(%i, %n) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0], start_index_map = [0]>, slice_sizes = array<i64: 1>}> : (tensor<Bxi32>, tensor<1xi32>) -> tensor<i32>\n'
            "%f = stablehlo.convert %t : (tensor<i32>) -> tensor<f32>\n"
            f"%g = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> {SAME}\n"
            f"%y = stablehlo.add %x, %g : {SAME}",
            UNKNOWN,
        ),
        (
            "%o = stablehlo.constant dense<1.0> : tensor<BxBxf32>\n"
            "%d = stablehlo.dot_general %o, %o, contracting_dims = [1] x [0] : (tensor<BxBxf32>, tensor<BxBxf32>) -> tensor<BxBxf32>\n"
            "%c = stablehlo.slice %d [0:1, 0:1] : (tensor<BxBxf32>) -> tensor<1x1xf32>\n"
            f"%g = stablehlo.broadcast_in_dim %c, dims = [0, 1] : (tensor<1x1xf32>) -> {SAME}\n"
            f"%y = stablehlo.add %x, %g : {SAME}",
            UNKNOWN,
        ),
        (
            # As many updates as there are rows are added to one element.
            "%o = stablehlo.constant dense<1.0> : tensor<Bxf32>\n"
            "%n = stablehlo.constant dense<0> : tensor<Bx1xi32>\n"
            "%w = stablehlo.constant dense<0.0> : tensor<4xf32>\n"
            '%s = "stablehlo.scatter"(%w, %n, %o) <{scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> '
            + SUM.replace("%s", "%q")
            + " : (tensor<4xf32>, tensor<Bx1xi32>, tensor<Bxf32>) -> tensor<4xf32>\n"
            f"%g = stablehlo.broadcast_in_dim %s, dims = [1] : (tensor<4xf32>) -> {SAME}\n"
            f"%y = stablehlo.add %x, %g : {SAME}",
            UNKNOWN,
        ),
        (
            "%i = stablehlo.iota dim = 0 : tensor<Bxf32>\n"
            "%v, %k = chlo.top_k(%i, k = 1) : tensor<Bxf32> -> (tensor<1xf32>, tensor<1xi32>)\n"
            f"%g = stablehlo.broadcast_in_dim %v, dims = [1] : (tensor<1xf32>) -> {SAME}\n"
            f"%y = stablehlo.add %x, %g : {SAME}",
            UNKNOWN,
        ),
        (
            "%c = stablehlo.convert %x : (tensor<Bx4xf32>) -> tensor<Bx4xcomplex<f32>>\n"
            "%t = stablehlo.transpose %c, dims = [1, 0] : (tensor<Bx4xcomplex<f32>>) -> tensor<4xBxcomplex<f32>>\n"
            "%f = stablehlo.fft %t, type = FFT, length = [B] : (tensor<4xBxcomplex<f32>>) -> tensor<4xBxcomplex<f32>>\n"
            "%r = stablehlo.real %f : (tensor<4xBxcomplex<f32>>) -> tensor<4xBxf32>\n"
            "%y = stablehlo.transpose %r, dims = [1, 0] : (tensor<4xBxf32>) -> tensor<Bx4xf32>",
            UNKNOWN,
        ),
        (
            # Every row of one matrix is a row of the batch.
            '%o = stablehlo.constant dense<1.0> : tensor<4x4xf32>\n'
            '%y = "stablehlo.triangular_solve"(%o, %t) <{left_side = true, lower = true, transpose_a = #stablehlo<transpose NO_TRANSPOSE>, unit_diagonal = false}> : (tensor<4x4xf32>, tensor<4xBxf32>) -> tensor<4xBxf32>\n',
            UNKNOWN,
        ),
        (
            # Every row of the batch is a column of the system to solve.
            '%o = stablehlo.constant dense<1.0> : tensor<4x4xf32>\n'
            '%r = stablehlo.transpose %x, dims = [1, 0] : (tensor<Bx4xf32>) -> tensor<4xBxf32>\n'
            '%s = "stablehlo.triangular_solve"(%o, %r) <{left_side = true, lower = true, transpose_a = #stablehlo<transpose NO_TRANSPOSE>, unit_diagonal = false}> : (tensor<4x4xf32>, tensor<4xBxf32>) -> tensor<4xBxf32>\n'
            f'%y = stablehlo.transpose %s, dims = [1, 0] : (tensor<4xBxf32>) -> {SAME}',
            PROVED,
        ),
        (
            # Every row of the result depends on all previous rows.
            '%o = stablehlo.constant dense<1.0> : tensor<BxBxf32>\n'
            '%y = "stablehlo.triangular_solve"(%o, %x) <{left_side = true, lower = true, transpose_a = #stablehlo<transpose NO_TRANSPOSE>, unit_diagonal = false}> : (tensor<BxBxf32>, tensor<Bx4xf32>) -> tensor<Bx4xf32>\n',
            UNKNOWN,
        ),
        (
            '%s = stablehlo.constant dense<1.0> : tensor<4xf32>\n'
            '%y, %m, %v = "stablehlo.batch_norm_training"(%x, %s, %s) <{epsilon = 0.001 : f32, feature_index = 1 : i64}> : (tensor<Bx4xf32>, tensor<4xf32>, tensor<4xf32>) -> (tensor<Bx4xf32>, tensor<4xf32>, tensor<4xf32>)',
            UNKNOWN,
        ),
        (
            '%s = stablehlo.constant dense<1.0> : tensor<4xf32>\n'
            '%y = "stablehlo.batch_norm_inference"(%x, %s, %s, %s, %s) <{epsilon = 0.001 : f32, feature_index = 1 : i64}> : (tensor<Bx4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<Bx4xf32>',
            PROVED,
        ),
        ('%y = stablehlo.custom_call @foreign(%x) : (tensor<Bx4xf32>) -> tensor<Bx4xf32>', UNKNOWN),
        ('%y = stablehlo.custom_call @lapack_sunheard_ffi(%x) : (tensor<Bx4xf32>) -> tensor<Bx4xf32>', UNKNOWN),
        (
            # The rows of the batch form one matrix.
            '%y, %i = stablehlo.custom_call @lapack_sgeqrf_ffi(%x) : (tensor<Bx4xf32>) -> (tensor<Bx4xf32>, tensor<4xf32>)',
            UNKNOWN,
        ),
        ('%y = stablehlo.custom_call @Sharding(%x) : (tensor<Bx4xf32>) -> tensor<Bx4xf32>', PROVED),
        ('%y = "stablehlo.all_gather"(%x) <{all_gather_dim = 1 : i64, replica_groups = dense<0> : tensor<1x1xi64>}> : (tensor<Bx4xf32>) -> tensor<Bx4xf32>', UNKNOWN),
        (
            '%a = stablehlo.constant dense<0.0> : tensor<f32>\n%b = stablehlo.constant dense<1.0> : tensor<f32>\n%h = stablehlo.constant dense<4> : tensor<1xi64>\n'
            '%u = stablehlo.rng %a, %b, %h, distribution = UNIFORM : (tensor<f32>, tensor<f32>, tensor<1xi64>) -> tensor<4xf32>\n'
            f"%g = stablehlo.broadcast_in_dim %u, dims = [1] : (tensor<4xf32>) -> {SAME}\n"
            f"%y = stablehlo.add %x, %g : {SAME}",
            UNKNOWN,
        ),
        (
            '%c, %k = chlo.top_k(%x, k = 4) : tensor<Bx4xf32> -> (tensor<Bx4xf32>, tensor<Bx4xi32>)\n'
            f"%y = stablehlo.add %c, %c : {SAME}",
            PROVED,
        ),
    ],
)  # fmt: skip
def test_a_program_is_judged(body: str, expected: Independence) -> None:
    arguments = ROW + (", %t: tensor<4xBxf32>" if "%t)" in body else "")
    returned = "%y : tensor<4xBxf32>" if "%t)" in body else f"%y : {SAME}"
    if "%t)" in body:
        arguments = "%x: tensor<Bx4xf32>"
        body = (
            "%t = stablehlo.transpose %x, dims = [1, 0] : (tensor<Bx4xf32>) -> tensor<4xBxf32>\n"
            + body
        )

    verdict = verdict_of(body, returned, arguments)

    assert verdict.independence == expected


LOOP = """
%n = stablehlo.constant dense<0.0> : tensor<f32>
%limit = stablehlo.constant dense<1.0> : tensor<Bx4xf32>
%other = stablehlo.constant dense<2.0> : tensor<Bx4xf32>
%half = stablehlo.constant dense<0.5> : tensor<Bx4xf32>
%no = stablehlo.constant dense<false> : tensor<i1>
%y = stablehlo.while(%v = %x) : tensor<Bx4xf32>
cond {
  %p = stablehlo.compare GT, %v, CONDITION, FLOAT : (tensor<Bx4xf32>, tensor<Bx4xf32>) -> tensor<Bx4xi1>
  %any = stablehlo.reduce(%p init: %no) applies stablehlo.or across dimensions = [0, 1] : (tensor<Bx4xi1>, tensor<i1>) -> tensor<i1>
  stablehlo.return %any : tensor<i1>
} do {
  %p = stablehlo.compare DIRECTION, SUBJECT, BODY, FLOAT : (tensor<Bx4xf32>, tensor<Bx4xf32>) -> tensor<Bx4xi1>
  %new = stablehlo.multiply %v, %half : tensor<Bx4xf32>
  %kept = stablehlo.select %p, NEW, OLD : tensor<Bx4xi1>, tensor<Bx4xf32>
  stablehlo.return %kept : tensor<Bx4xf32>
}
"""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, PROVED),
        ({"DIRECTION": "GE"}, UNKNOWN),
        ({"BODY": "%other"}, UNKNOWN),
        ({"CONDITION": "%other"}, UNKNOWN),
        ({"NEW": "%v", "OLD": "%new"}, UNKNOWN),
        ({"OLD": "%half"}, UNKNOWN),
        ({"SUBJECT": "%x"}, UNKNOWN),
        ({"BODY": "%x", "CONDITION": "%x"}, PROVED),
        ({"BODY": "%x"}, UNKNOWN),
        ({"BODY": "%half", "CONDITION": "%limit"}, UNKNOWN),
    ],
)
def test_a_loop_until_all_rows_are_done_keeps_those_that_are(
    changes: dict[str, str], expected: Independence
) -> None:
    words = {
        "CONDITION": "%limit",
        "BODY": "%limit",
        "DIRECTION": "GT",
        "SUBJECT": "%v",
        "NEW": "%new",
        "OLD": "%v",
    }
    body = LOOP
    for word, said in (words | changes).items():
        body = body.replace(word, said)

    verdict = verdict_of(body, f"%y : {SAME}")

    assert verdict.independence == expected
    assert verdict.loops_follow_rows


REDUCED = """
%l = stablehlo.constant dense<1.0> : tensor<Bxf32>
%z = stablehlo.constant dense<0.0> : tensor<f32>
%half = stablehlo.constant dense<0.5> : tensor<Bx4xf32>
%no = stablehlo.constant dense<false> : tensor<i1>
%y = stablehlo.while(%v = %x) : tensor<Bx4xf32>
cond {
  %m = stablehlo.reduce(%v init: %z) applies stablehlo.maximum across dimensions = [1] : (tensor<Bx4xf32>, tensor<f32>) -> tensor<Bxf32>
  %p = stablehlo.compare GT, %m, %l, FLOAT : (tensor<Bxf32>, tensor<Bxf32>) -> tensor<Bxi1>
  %any = stablehlo.reduce(%p init: %no) applies stablehlo.or across dimensions = [0] : (tensor<Bxi1>, tensor<i1>) -> tensor<i1>
  stablehlo.return %any : tensor<i1>
} do {
  %m = stablehlo.reduce(%v init: %z) applies stablehlo.HOW across dimensions = [1] : (tensor<Bx4xf32>, tensor<f32>) -> tensor<Bxf32>
  %p = stablehlo.compare GT, %m, %l, FLOAT : (tensor<Bxf32>, tensor<Bxf32>) -> tensor<Bxi1>
  %q = stablehlo.broadcast_in_dim %p, dims = [0] : (tensor<Bxi1>) -> tensor<Bx4xi1>
  %new = stablehlo.multiply %v, %half : tensor<Bx4xf32>
  %kept = stablehlo.select %q, %new, %v : tensor<Bx4xi1>, tensor<Bx4xf32>
  stablehlo.return %kept : tensor<Bx4xf32>
}
"""


@pytest.mark.parametrize(("how", "expected"), [("maximum", PROVED), ("add", UNKNOWN)])
def test_predicates_are_the_same_where_what_is_inside_of_them_is(
    how: str, expected: Independence
) -> None:
    verdict = verdict_of(REDUCED.replace("HOW", how), f"%y : {SAME}")

    assert verdict.independence == expected


def test_two_sizes_that_are_computed_otherwise_do_not_match() -> None:
    add = f"%y = stablehlo.add %x, %x : {SAME}"

    with pytest.raises(program.Mismatch):
        verdict_of(add, f"%y : {SAME}", second=add.replace("add", "multiply"))


def test_two_sizes_that_take_other_operands_do_not_match() -> None:
    body = f"%a = stablehlo.negate %x : {SAME}\n%y = stablehlo.subtract %x, %a : {SAME}"

    with pytest.raises(program.Mismatch):
        verdict_of(body, f"%y : {SAME}", second=body.replace("%x, %a", "%a, %x"))


def test_two_sizes_that_differ_in_an_attribute_do_not_match() -> None:
    body = f"%y = stablehlo.reverse %x, dims = [1] : {SAME}"

    with pytest.raises(program.Mismatch):
        verdict_of(body, f"%y : {SAME}", second=body.replace("[1]", "[0]"))


CONVOLVED = (
    "%n = stablehlo.constant dense<1.0> : tensor<2x1x1xf32>\n"
    "%i = stablehlo.reshape %x : (tensor<Bx4xf32>) -> tensor<Bx4x1xf32>\n"
    "%c = stablehlo.convolution(%i, %n) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], window = "
    "{stride = [1], pad = [[LOW, HIGH]], lhs_dilate = [1], rhs_dilate = [1], reverse = [false]} "
    "{batch_group_count = 1 : i64, feature_group_count = 1 : i64} : "
    "(tensor<Bx4x1xf32>, tensor<2x1x1xf32>) -> tensor<Bx4x1xf32>\n"
    "%y = stablehlo.reshape %c : (tensor<Bx4x1xf32>) -> tensor<Bx4xf32>"
)


@pytest.mark.parametrize(("low", "high", "expected"), [(36, -35, UNKNOWN), (1, 0, PROVED)])
def test_padding_that_moves_with_the_batch_is_no_rule(
    low: int, high: int, expected: Independence
) -> None:
    step = 4 if low > 1 else 0
    first = CONVOLVED.replace("LOW", str(low)).replace("HIGH", str(high))
    second = CONVOLVED.replace("LOW", str(low + step)).replace("HIGH", str(high - step))

    verdict = verdict_of(first, f"%y : {SAME}", second=second)

    assert verdict.independence == expected


TABLE = (
    f"%t = stablehlo.constant dense<{list(range(64))}> : tensor<64xi32>\n"
    "%c = stablehlo.slice %t [FROM:TO] : (tensor<64xi32>) -> tensor<4xi32>\n"
    "%f = stablehlo.convert %c : (tensor<4xi32>) -> tensor<4xf32>\n"
    f"%g = stablehlo.broadcast_in_dim %f, dims = [1] : (tensor<4xf32>) -> {SAME}\n"
    f"%y = stablehlo.add %x, %g : {SAME}"
)


@pytest.mark.parametrize(("step", "expected"), [(4, UNKNOWN), (0, PROVED)])
def test_a_table_that_is_cut_where_the_batch_ends_is_not_known(
    step: int, expected: Independence
) -> None:
    first, second = (
        TABLE.replace("FROM", str(start)).replace("TO", str(start + 4)) for start in (37, 37 + step)
    )

    verdict = verdict_of(first, f"%y : {SAME}", second=second)

    assert verdict.independence == expected


TWICE = (
    f"%n = stablehlo.negate %x : {SAME}\n"
    f"%j = stablehlo.concatenate %x, %n, dim = 0 : ({SAME}, {SAME}) -> tensor<2Bx4xf32>\n"
)
ONES = "%o = stablehlo.constant dense<1.0> : tensor<Bx4xf32>\n"
SUM_OF_ROWS = (
    "%z = stablehlo.constant dense<0.0> : tensor<f32>\n"
    "%m = stablehlo.reduce(%x init: %z) applies stablehlo.add across dimensions = [0] : "
    "(tensor<Bx4xf32>, tensor<f32>) -> tensor<4xf32>\n"
)


@pytest.mark.parametrize(
    "body",
    [
        f"{TWICE}%y = stablehlo.slice %j [0:B, 0:4] : (tensor<2Bx4xf32>) -> {SAME}",
        f"{TWICE}%y = stablehlo.slice %j [B:2B, 0:4] : (tensor<2Bx4xf32>) -> {SAME}",
        # Nothing is taken of the rows, and appended to them.
        "%e = stablehlo.slice %x [3:3, 0:4] : (tensor<Bx4xf32>) -> tensor<0x4xf32>\n"
        f"%y = stablehlo.concatenate %x, %e, dim = 0 : ({SAME}, tensor<0x4xf32>) -> {SAME}",
        # A constant that is equal for all rows may be reversed.
        f"{ONES}%r = stablehlo.reverse %o, dims = [0] : {SAME}\n%y = stablehlo.add %x, %r : {SAME}",
        # A loop that carries one value that mixes rows, and one that does not.
        SUM_OF_ROWS + "%c = stablehlo.constant dense<0> : tensor<i32>\n"
        "%w:3 = stablehlo.while(%i = %c, %v = %x, %a = %m) : tensor<i32>, tensor<Bx4xf32>, "
        "tensor<4xf32>\n"
        "cond {\n"
        "  %l = stablehlo.constant dense<3> : tensor<i32>\n"
        "  %p = stablehlo.compare LT, %i, %l, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>\n"
        "  stablehlo.return %p : tensor<i1>\n"
        "} do {\n"
        "  %s = stablehlo.constant dense<1> : tensor<i32>\n"
        "  %k = stablehlo.add %i, %s : tensor<i32>\n"
        "  %h = stablehlo.tanh %v : tensor<Bx4xf32>\n"
        "  stablehlo.return %k, %h, %a : tensor<i32>, tensor<Bx4xf32>, tensor<4xf32>\n"
        "}\n"
        "%y = stablehlo.negate %w#1 : tensor<Bx4xf32>",
    ],
    ids=["first block", "second block", "nothing", "reversed ones", "loop beside a sum"],
)
def test_a_program_of_rows_by_themselves_is_proved(body: str) -> None:
    verdict = verdict_of(body, f"%y : {SAME}")

    assert verdict.independence == PROVED


JOINED = """
%a = stablehlo.constant dense<2> : tensor<1xi32>
%b = stablehlo.constant dense<B> : tensor<1xi32>
%v = stablehlo.concatenate %a, %b, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
%s = stablehlo.slice %v [{place}] : (tensor<2xi32>) -> tensor<1xi32>
%f = stablehlo.convert %s : (tensor<1xi32>) -> tensor<1xf32>
%w = stablehlo.broadcast_in_dim %f, dims = [1] : (tensor<1xf32>) -> tensor<Bx4xf32>
%y = stablehlo.add %x, %w : tensor<Bx4xf32>
"""


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("0:1", "proved"),
        ("1:2", "unknown: stablehlo.add computes with the batch size"),
    ],
)
def test_integers_that_are_joined_stay_known_one_by_one(place: str, expected: str) -> None:
    """Only one of the joined integers grows with the batch."""
    verdict = verdict_of(JOINED.format(place=place), "%y : tensor<Bx4xf32>")

    assert str(verdict).startswith(expected)
