"""Refusal texts of each rule, on StableHLO programs."""

# Programs are not wrapped.
# ruff: noqa: E501

import pytest
from support.row_texts import verdict_of

X = "%x: tensor<Bx4xf32>"
SAME = "tensor<Bx4xf32>"
IMAGE = "%x: tensor<Bx4x4xf32>"
LAYERS = "tensor<Bx4x4xf32>"
SUM = "({ ^bb0(%l: tensor<f32>, %r: tensor<f32>): %s = stablehlo.add %l, %r : tensor<f32> stablehlo.return %s : tensor<f32> })"
TURNED = "%t = stablehlo.transpose %x, dims = [1, 0] : (tensor<Bx4xf32>) -> tensor<4xBxf32>\n"
ZERO = "%z = stablehlo.constant dense<0.0> : tensor<f32>\n"
TOTAL = ZERO + (
    f'%q = "stablehlo.reduce"(%x, %z) {SUM} {{dimensions = array<i64: 0, 1>}} : (tensor<Bx4xf32>, tensor<f32>) -> tensor<f32>\n'
)
PLACE = (
    TOTAL + "%p = stablehlo.convert %q : (tensor<f32>) -> tensor<i32>\n"
    "%o = stablehlo.constant dense<0> : tensor<i32>\n"
)
BACK = "%y = stablehlo.transpose %v, dims = [1, 0] : (tensor<4xBxf32>) -> tensor<Bx4xf32>"
WINDOW = "(%l: tensor<f32>, %r: tensor<f32>)"
Y = f"%y : {SAME}"


def call(name: str, operands: str, kinds: str, result: str) -> str:
    return f"%y = stablehlo.custom_call @{name}({operands}) : ({kinds}) -> {result}"


def convolution(operands: str, numbers: str, kinds: str, groups: int = 1, batches: int = 1) -> str:
    return (
        f'%y = "stablehlo.convolution"({operands}) {{dimension_numbers = #stablehlo.conv<{numbers}>, '
        f"feature_group_count = {groups} : i64, batch_group_count = {batches} : i64}} : {kinds}"
    )


def one_by_one(taken: str, returned: str) -> str:
    """Return a loop that processes one row per trip, carries two batches, and returns the first."""
    return (
        f"%o = stablehlo.constant dense<0> : tensor<i32>\n%e = stablehlo.constant dense<0.0> : {SAME}\n"
        f"%r:3 = stablehlo.while(%i = %o, %a = %e, %b = %e) : tensor<i32>, {SAME}, {SAME} cond {{\n"
        "%n = stablehlo.constant dense<4> : tensor<i32>\n%c = stablehlo.compare LT, %i, %n, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>\n"
        "stablehlo.return %c : tensor<i1> } do {\n"
        f"%s = stablehlo.dynamic_slice %x, %i, %o, sizes = [1, 4] : ({SAME}, tensor<i32>, tensor<i32>) -> tensor<1x4xf32>\n"
        f"%p = stablehlo.dynamic_update_slice %{taken}, %s, %i, %o : ({SAME}, tensor<1x4xf32>, tensor<i32>, tensor<i32>) -> {SAME}\n"
        f"%g = stablehlo.negate %p : {SAME}\n"
        "%u = stablehlo.constant dense<1> : tensor<i32>\n%j = stablehlo.add %i, %u : tensor<i32>\n"
        f"stablehlo.return %j, {returned} : tensor<i32>, {SAME}, {SAME} }}\n"
        f"%y = stablehlo.negate %r#1 : {SAME}"
    )


def blocks(others: int) -> str:
    """Return a slice of rows from their concatenation with this many other blocks."""
    operands, kinds = ", ".join(["%x", *["%o"] * others]), ", ".join([SAME] * (others + 1))
    whole = f"tensor<{others + 1}Bx4xf32>"
    return (
        f"%o = stablehlo.constant dense<1.0> : {SAME}\n%c = stablehlo.concatenate {operands}, dim = 0 : ({kinds}) -> {whole}\n"
        f"%y = stablehlo.slice %c [0:B, 0:4] : ({whole}) -> {SAME}"
    )


def triangular(operands: str, kinds: str) -> str:
    return (
        f'%v = "stablehlo.triangular_solve"({operands}) {{left_side = true, lower = true, unit_diagonal = false, '
        f"transpose_a = #stablehlo<transpose NO_TRANSPOSE>}} : {kinds}\n"
    )


TABLE: dict[str, tuple[str, str, str, str]] = {
    "a reduction by what has no rule": (
        ZERO
        + '%y = "stablehlo.reduce"(%x, %z) ({ ^bb0(%l: tensor<f32>, %r: tensor<f32>): %s = stablehlo.reshape %l : (tensor<f32>) -> tensor<f32> stablehlo.return %s : tensor<f32> }) {dimensions = array<i64: 1>} : (tensor<Bx4xf32>, tensor<f32>) -> tensor<Bxf32>',
        "%y : tensor<Bxf32>", X,
        "contains stablehlo.reshape, which is not supported in its region",
    ),
    "a reduction with a value of rows": (
        TOTAL
        + '%y = "stablehlo.reduce"(%x, %z) ({ ^bb0(%l: tensor<f32>, %r: tensor<f32>): %s = stablehlo.add %l, %q : tensor<f32> stablehlo.return %s : tensor<f32> }) {dimensions = array<i64: 1>} : (tensor<Bx4xf32>, tensor<f32>) -> tensor<Bxf32>',
        "%y : tensor<Bxf32>", X,
        "computes with a value of several rows",
    ),
    "a reduction from a value of rows": (
        TOTAL
        + f'%y = "stablehlo.reduce"(%x, %q) {SUM} {{dimensions = array<i64: 1>}} : (tensor<Bx4xf32>, tensor<f32>) -> tensor<Bxf32>',
        "%y : tensor<Bxf32>", X,
        "reduces over the rows",
    ),
    "windows over rows": (
        ZERO
        + f'%y = "stablehlo.reduce_window"(%x, %z) {SUM} {{window_dimensions = array<i64: 2, 1>, padding = dense<[[1, 0], [0, 0]]> : tensor<2x2xi64>}} : (tensor<Bx4xf32>, tensor<f32>) -> {SAME}',
        Y, X,
        "moves windows over the rows",
    ),
    "windows over as much as rows": (
        "%i = stablehlo.iota dim = 0 : tensor<Bx4xf32>\n" + ZERO
        + f'%w = "stablehlo.reduce_window"(%i, %z) {SUM} {{window_dimensions = array<i64: 3, 1>, padding = dense<[[1, 1], [0, 0]]> : tensor<2x2xi64>}} : (tensor<Bx4xf32>, tensor<f32>) -> {SAME}\n'
        f"%y = stablehlo.add %x, %w : {SAME}",
        Y, X,
        "moves windows over a dimension whose size is the batch size",
    ),
    "padding by rows": (
        "%s = stablehlo.slice %x [0:1, 0:1] : (tensor<Bx4xf32>) -> tensor<1x1xf32>\n"
        "%r = stablehlo.reshape %s : (tensor<1x1xf32>) -> tensor<f32>\n"
        f"%y = stablehlo.pad %x, %r, low = [0, 0], high = [0, 1], interior = [0, 0] : ({SAME}, tensor<f32>) -> tensor<Bx5xf32>",
        "%y : tensor<Bx5xf32>", X,
        "selects some of the rows",
    ),
    "rows that are cut off by padding": (
        ZERO
        + f"%p = stablehlo.pad %x, %z, low = [-1, 0], high = [1, 0], interior = [0, 0] : ({SAME}, tensor<f32>) -> {SAME}\n"
        f"%y = stablehlo.add %x, %p : {SAME}",
        Y, X,
        "inserts elements between rows, or removes rows",
    ),
    "two dimensions of rows, side by side": (
        "%a = stablehlo.broadcast_in_dim %x, dims = [0, 2] : (tensor<Bx4xf32>) -> tensor<BxBx4xf32>\n"
        "%b = stablehlo.broadcast_in_dim %x, dims = [1, 2] : (tensor<Bx4xf32>) -> tensor<BxBx4xf32>\n"
        "%y = stablehlo.concatenate %a, %b, dim = 0 : (tensor<BxBx4xf32>, tensor<BxBx4xf32>) -> tensor<2BxBx4xf32>",
        "%y : tensor<2BxBx4xf32>", X,
        "computes something for every pair of rows",
    ),
    "every second of as much as rows": (
        "%i = stablehlo.iota dim = 0 : tensor<2Bx4xf32>\n"
        "%s = stablehlo.slice %i [0:2B:2, 0:4] : (tensor<2Bx4xf32>) -> tensor<Bx4xf32>\n"
        f"%y = stablehlo.add %x, %s : {SAME}",
        Y, X,
        "takes strided elements of a dimension whose size is the batch size",
    ),
    "bits of several rows": (
        TURNED
        + "%n = stablehlo.convert %t : (tensor<4xBxf32>) -> tensor<4xBxi16>\n"
        "%v = stablehlo.reshape %n : (tensor<4xBxi16>) -> tensor<4xBx1xi16>\n"
        "%w = stablehlo.concatenate %v, %v, dim = 2 : (tensor<4xBx1xi16>, tensor<4xBx1xi16>) -> tensor<4xBx2xi16>\n"
        "%b = stablehlo.bitcast_convert %w : (tensor<4xBx2xi16>) -> tensor<4xBxi32>\n"
        "%y = stablehlo.transpose %b, dims = [1, 0] : (tensor<4xBxi32>) -> tensor<Bx4xi32>",
        "%y : tensor<Bx4xi32>", X,
        "",
    ),
    "bits of one": (
        f"%b = stablehlo.bitcast_convert %x : ({SAME}) -> tensor<Bx4x2xi16>\n"
        "%y = stablehlo.bitcast_convert %b : (tensor<Bx4x2xi16>) -> tensor<Bx4xi32>",
        "%y : tensor<Bx4xi32>", X,
        "",
    ),
    "bits of every second row": (
        "%t = stablehlo.broadcast_in_dim %x, dims = [1, 0] : (tensor<Bx4xf32>) -> tensor<4xBxf32>\n"
        "%d = stablehlo.convert %t : (tensor<4xBxf32>) -> tensor<4xBxi1>\n"
        "%c = stablehlo.transpose %d, dims = [1, 0] : (tensor<4xBxi1>) -> tensor<Bx4xi1>\n"
        f"%y = stablehlo.convert %c : (tensor<Bx4xi1>) -> {SAME}",
        Y, X,
        "",
    ),
    "bits drawn for each row": (
        "%b = stablehlo.bitcast_convert %x : (tensor<Bx4xf32>) -> tensor<Bx4xui32>\n"
        "%f = stablehlo.slice %b [0:B, 0:1] : (tensor<Bx4xui32>) -> tensor<Bx1xui32>\n"
        "%r = stablehlo.reshape %f : (tensor<Bx1xui32>) -> tensor<Bxui32>\n"
        "%w = stablehlo.convert %r : (tensor<Bxui32>) -> tensor<Bxui64>\n"
        "%s, %v = stablehlo.rng_bit_generator %w, algorithm = DEFAULT : (tensor<Bxui64>) -> (tensor<Bxui64>, tensor<Bx4xui32>)\n"
        f"%y = stablehlo.convert %v : (tensor<Bx4xui32>) -> {SAME}",
        Y, X,
        "draws random bits from a state that differs between rows",
    ),
    "a transform along rows": (
        TURNED
        + "%c = stablehlo.convert %t : (tensor<4xBxf32>) -> tensor<4xBxcomplex<f32>>\n"
        "%f = stablehlo.fft %c, type = FFT, length = [B] : (tensor<4xBxcomplex<f32>>) -> tensor<4xBxcomplex<f32>>\n"
        "%v = stablehlo.real %f : (tensor<4xBxcomplex<f32>>) -> tensor<4xBxf32>\n" + BACK,
        Y, X,
        "uses the batch size for its 'fft_length', which has no rule",
    ),
    "a transform along as much as rows": (
        "%i = stablehlo.iota dim = 1 : tensor<4xBxcomplex<f32>>\n"
        "%f = stablehlo.fft %i, type = FFT, length = [B] : (tensor<4xBxcomplex<f32>>) -> tensor<4xBxcomplex<f32>>\n"
        "%v = stablehlo.real %f : (tensor<4xBxcomplex<f32>>) -> tensor<4xBxf32>\n"
        "%w = stablehlo.transpose %v, dims = [1, 0] : (tensor<4xBxf32>) -> tensor<Bx4xf32>\n"
        f"%y = stablehlo.add %x, %w : {SAME}",
        Y, X,
        "uses the batch size for its 'fft_length', which has no rule",
    ),
    "multiplies by a matrix whose size is the batch size": (
        "%i = stablehlo.iota dim = 0 : tensor<BxBxf32>\n"
        "%c = stablehlo.cholesky %i, lower = true : tensor<BxBxf32>\n"
        "%s = stablehlo.slice %c [0:1, 0:4] : (tensor<BxBxf32>) -> tensor<1x4xf32>\n"
        "%y = stablehlo.broadcast_in_dim %s, dims = [0, 1] : (tensor<1x4xf32>) -> tensor<Bx4xf32>",
        Y, X,
        "multiplies by a matrix whose size is the batch size",
    ),
    "statistics of features that are rows": (
        "%t = stablehlo.transpose %x, dims = [1, 0] : (tensor<Bx4xf32>) -> tensor<4xBxf32>\n"
        "%o = stablehlo.constant dense<1.0> : tensor<Bxf32>\n"
        '%v, %m, %s = "stablehlo.batch_norm_training"(%t, %o, %o) {epsilon = 0.1 : f32, feature_index = 1 : i64} : (tensor<4xBxf32>, tensor<Bxf32>, tensor<Bxf32>) -> (tensor<4xBxf32>, tensor<Bxf32>, tensor<Bxf32>)\n'
        + BACK,
        Y, X,
        "computes statistics",
    ),
    "statistics of rows": (
        "%o = stablehlo.constant dense<1.0> : tensor<4xf32>\n"
        '%y, %m, %s = "stablehlo.batch_norm_training"(%x, %o, %o) {epsilon = 0.1 : f32, feature_index = 1 : i64} : (tensor<Bx4xf32>, tensor<4xf32>, tensor<4xf32>) -> (tensor<Bx4xf32>, tensor<4xf32>, tensor<4xf32>)',
        Y, X,
        "normalizes by statistics of all rows",
    ),
    "a foreign function of vectors, for matrices": (
        call("lapack_spotrf_ffi", "%v", "tensor<Bxf32>", "tensor<Bxf32>"),
        "%y : tensor<Bxf32>", "%v: tensor<Bxf32>",
        "has operands of unexpected ranks",
    ),
    "a foreign function of few dimensions": (
        "%k = stablehlo.constant dense<1.0> : tensor<4xf32>\n"
        "%b = stablehlo.reshape %x : (tensor<Bx4x4xf32>) -> tensor<Bx1x4x4xf32>\n"
        + call("lapack_spotrf_ffi", "%b, %k", "tensor<Bx1x4x4xf32>, tensor<4xf32>", "tensor<Bx1x4x4xf32>"),
        "%y : tensor<Bx1x4x4xf32>", IMAGE,
        "has operands of unexpected ranks",
    ),
    "a foreign function that gives less": (
        call("lapack_spotrf_ffi", "%x", LAYERS, "tensor<4x4xf32>"),
        "%y : tensor<4x4xf32>", IMAGE,
        "has results of unexpected ranks",
    ),
    "a foreign function with a number": (
        ZERO + call("lapack_spotrf_ffi", "%x, %z", f"{LAYERS}, tensor<f32>", LAYERS),
        f"%y : {LAYERS}", IMAGE,
        "",
    ),
    "a foreign function with rows in its matrix": (
        TURNED + call("lapack_spotrf_ffi", "%t", "tensor<4xBxf32>", "tensor<4xBxf32>") .replace("%y", "%v") + "\n" + BACK,
        Y, X,
        "multiplies by a matrix that contains rows of the batch",
    ),
    "a foreign function of elements": (
        call("cu_threefry2x32_ffi", "%x, %x", f"{SAME}, {SAME}", SAME),
        Y, X,
        "",
    ),
    "a foreign function of other elements": (
        call("cu_threefry2x32_ffi", "%x", SAME, "tensor<Bxf32>"),
        "%y : tensor<Bxf32>", X,
        "has operands of unexpected shapes",
    ),
    "a mark that changes what it marks": (
        call("Sharding", "%x", SAME, "tensor<Bx2xf32>"),
        "%y : tensor<Bx2xf32>", X,
        "has operands and results of different types",
    ),
    "a mark": (call("Sharding", "%x", SAME, SAME), Y, X, ""),
    "a function that nobody knows": (
        call("unheard_of", "%x", SAME, SAME), Y, X, "calls 'unheard_of', which has no rule",
    ),
    "a convolution in groups of the batch": (
        "%k = stablehlo.constant dense<1.0> : tensor<2x4x1xf32>\n"
        + convolution("%x, %k", "[f, b, 0]x[i, o, 0]->[b, f, 0]", "(tensor<2x4x4xf32>, tensor<2x4x1xf32>) -> tensor<2x4x4xf32>", batches=2)
        + "\n" + "%w = stablehlo.negate %x : tensor<2x4x4xf32>",
        "%w : tensor<2x4x4xf32>", "%x: tensor<2x4x4xf32>",
        "it depends on the row's index in the batch",
    ),
    "a convolution over rows": (
        "%k = stablehlo.constant dense<1.0> : tensor<4x4x1xf32>\n"
        + convolution("%x, %k", "[0, b, f]x[i, o, 0]->[0, b, f]", f"({LAYERS}, tensor<4x4x1xf32>) -> {LAYERS}"),
        f"%y : {LAYERS}", IMAGE,
        "moves a kernel over the rows",
    ),
    "a convolution over as much as rows": (
        "%i = stablehlo.iota dim = 0 : tensor<Bx4x4xf32>\n%k = stablehlo.constant dense<1.0> : tensor<4x4x1xf32>\n"
        + convolution("%i, %k", "[0, b, f]x[i, o, 0]->[0, b, f]", f"({LAYERS}, tensor<4x4x1xf32>) -> {LAYERS}").replace("%y", "%w")
        + f"\n%y = stablehlo.add %x, %w : {LAYERS}",
        f"%y : {LAYERS}", IMAGE,
        "moves a kernel over a dimension whose size is the batch size",
    ),
    "a convolution of features that are rows": (
        "%k = stablehlo.constant dense<1.0> : tensor<4xBx1xf32>\n"
        + convolution("%x, %k", "[f, b, 0]x[o, i, 0]->[b, f, 0]", "(tensor<Bx4x4xf32>, tensor<4xBx1xf32>) -> tensor<4x4x4xf32>"),
        "%y : tensor<4x4x4xf32>", IMAGE,
        "contracts over the rows",
    ),
    "a kernel of rows": (
        "%i = stablehlo.constant dense<1.0> : tensor<4xBx4xf32>\n%k = stablehlo.reshape %x : (tensor<Bx4x4xf32>) -> tensor<Bx4x4xf32>\n"
        + convolution("%i, %k", "[b, f, 0]x[i, o, 0]->[b, f, 0]", "(tensor<4xBx4xf32>, tensor<Bx4x4xf32>) -> tensor<4x4x1xf32>"),
        "%y : tensor<4x4x1xf32>", IMAGE,
        "contracts over the rows",
    ),
    "a convolution of as many features as rows": (
        "%i = stablehlo.iota dim = 1 : tensor<4xBx4xf32>\n%k = stablehlo.constant dense<1.0> : tensor<Bx4x1xf32>\n"
        + convolution("%i, %k", "[b, f, 0]x[i, o, 0]->[b, f, 0]", "(tensor<4xBx4xf32>, tensor<Bx4x1xf32>) -> tensor<4x4x4xf32>").replace("%y", "%w")
        + "\n%c = stablehlo.broadcast_in_dim %w, dims = [1, 2, 3] : (tensor<4x4x4xf32>) -> tensor<Bx4x4x4xf32>\n"
        "%d = stablehlo.broadcast_in_dim %x, dims = [0, 1, 2] : (tensor<Bx4x4xf32>) -> tensor<Bx4x4x4xf32>\n"
        "%y = stablehlo.add %c, %d : tensor<Bx4x4x4xf32>",
        "%y : tensor<Bx4x4x4xf32>", IMAGE,
        "sums over a feature dimension whose size is the batch size",
    ),
    "a slice that is put nowhere": (
        "%e = stablehlo.constant dense<0.0> : tensor<Bx0xf32>\n%i = stablehlo.constant dense<0> : tensor<i32>\n"
        f"%y = stablehlo.dynamic_update_slice %x, %e, %i, %i : ({SAME}, tensor<Bx0xf32>, tensor<i32>, tensor<i32>) -> {SAME}",
        Y, X,
        "",
    ),
    "a slice at a place of rows": (
        TOTAL + "%i = stablehlo.convert %q : (tensor<f32>) -> tensor<i32>\n%o = stablehlo.constant dense<0> : tensor<i32>\n"
        "%u = stablehlo.constant dense<1.0> : tensor<Bx2xf32>\n%c = stablehlo.iota dim = 1 : tensor<Bx4xf32>\n"
        f"%w = stablehlo.dynamic_update_slice %c, %u, %o, %i : ({SAME}, tensor<Bx2xf32>, tensor<i32>, tensor<i32>) -> {SAME}\n"
        f"%y = stablehlo.add %x, %w : {SAME}",
        Y, X,
        "reduces over the rows",
    ),
    "a slice of as much as rows": (
        "%i = stablehlo.iota dim = 0 : tensor<Bx4xf32>\n%o = stablehlo.constant dense<0> : tensor<i32>\n"
        "%s = stablehlo.dynamic_slice %i, %p, %o, sizes = [1, 4] : (tensor<Bx4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32>\n"
        "%y = stablehlo.broadcast_in_dim %s, dims = [0, 1] : (tensor<1x4xf32>) -> tensor<Bx4xf32>",
        Y, X + ", %p: tensor<i32>",
        "indexes a dimension whose size is the batch size",
    ),
    "a slice that replaces some of as much as rows": (
        "%i = stablehlo.iota dim = 1 : tensor<Bx4xf32>\n%u = stablehlo.constant dense<9.0> : tensor<1x4xf32>\n%o = stablehlo.constant dense<0> : tensor<i32>\n"
        f"%w = stablehlo.dynamic_update_slice %i, %u, %p, %o : ({SAME}, tensor<1x4xf32>, tensor<i32>, tensor<i32>) -> {SAME}\n"
        "%s = stablehlo.slice %w [0:1, 0:4] : (tensor<Bx4xf32>) -> tensor<1x4xf32>\n"
        "%y = stablehlo.broadcast_in_dim %s, dims = [0, 1] : (tensor<1x4xf32>) -> tensor<Bx4xf32>",
        Y, X + ", %p: tensor<i32>",
        "indexes a dimension whose size is the batch size",
    ),
    "an input of no elements": (
        "%y = stablehlo.negate %x : tensor<Bx0xf32>", "%y : tensor<Bx0xf32>", "%x: tensor<Bx0xf32>", "",
    ),
    "solutions for each row": (
        TURNED + "%a = stablehlo.dot_general %t, %x, contracting_dims = [1] x [0] : (tensor<4xBxf32>, tensor<Bx4xf32>) -> tensor<4x4xf32>\n"
        + triangular("%a, %t", "(tensor<4x4xf32>, tensor<4xBxf32>) -> tensor<4xBxf32>") + BACK,
        Y, X,
        "contracts over the rows",
    ),
    "a system for all rows": (
        TURNED + "%a = stablehlo.constant dense<2.0> : tensor<4x4xf32>\n"
        + triangular("%a, %t", "(tensor<4x4xf32>, tensor<4xBxf32>) -> tensor<4xBxf32>") + BACK,
        Y, X,
        "",
    ),
    "a system of each row for all": (
        "%a = stablehlo.broadcast_in_dim %x, dims = [0, 2] : (tensor<Bx4xf32>) -> tensor<Bx4x4xf32>\n"
        "%t = stablehlo.broadcast_in_dim %x, dims = [2, 1] : (tensor<Bx4xf32>) -> tensor<Bx4xBxf32>\n"
        + triangular("%a, %t", "(tensor<Bx4x4xf32>, tensor<Bx4xBxf32>) -> tensor<Bx4xBxf32>")
        + "%y = stablehlo.negate %v : tensor<Bx4xBxf32>",
        "%y : tensor<Bx4xBxf32>", X,
        "solves systems that differ between rows",
    ),
    "systems as many as rows for rows": (
        "%a = stablehlo.constant dense<2.0> : tensor<Bx4x4xf32>\n"
        "%t = stablehlo.broadcast_in_dim %x, dims = [2, 1] : (tensor<Bx4xf32>) -> tensor<Bx4xBxf32>\n"
        + triangular("%a, %t", "(tensor<Bx4x4xf32>, tensor<Bx4xBxf32>) -> tensor<Bx4xBxf32>")
        + "%y = stablehlo.negate %v : tensor<Bx4xBxf32>",
        "%y : tensor<Bx4xBxf32>", X,
        "solves systems whose size is the batch size",
    ),
    "a constant of another size in another batch": (
        f"%y = stablehlo.custom_call @Sharding(%x) : ({SAME}) -> {SAME}\n%k = stablehlo.constant dense<0.5> : tensor<0xf32>",
        Y, X,
        "",
    ),
    "true for none": (
        "%e = stablehlo.constant dense<true> : tensor<Bx0xi1>\n%o = stablehlo.constant dense<true> : tensor<i1>\n"
        '%r = "stablehlo.reduce"(%e, %o) ({ ^bb0(%l: tensor<i1>, %m: tensor<i1>): %s = stablehlo.and %l, %m : tensor<i1> stablehlo.return %s : tensor<i1> }) {dimensions = array<i64: 1>} : (tensor<Bx0xi1>, tensor<i1>) -> tensor<Bxi1>',
        "%r : tensor<Bxi1>", X,
        "",
    ),
    "a sum over rows, one by one": (
        "%o = stablehlo.constant dense<0> : tensor<i32>\n%e = stablehlo.constant dense<0.0> : tensor<1x4xf32>\n"
        "%r:2 = stablehlo.while(%i = %o, %a = %e) : tensor<i32>, tensor<1x4xf32> cond {\n"
        "%n = stablehlo.constant dense<4> : tensor<i32>\n%c = stablehlo.compare LT, %i, %n, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>\n"
        "stablehlo.return %c : tensor<i1> } do {\n"
        f"%s = stablehlo.dynamic_slice %x, %i, %o, sizes = [1, 4] : ({SAME}, tensor<i32>, tensor<i32>) -> tensor<1x4xf32>\n"
        "%b = stablehlo.add %a, %s : tensor<1x4xf32>\n%u = stablehlo.constant dense<1> : tensor<i32>\n"
        "%j = stablehlo.add %i, %u : tensor<i32>\nstablehlo.return %j, %b : tensor<i32>, tensor<1x4xf32> }\n"
        "%y = stablehlo.broadcast_in_dim %r#1, dims = [0, 1] : (tensor<1x4xf32>) -> tensor<Bx4xf32>",
        Y, X,
        "carries state from row to row",
    ),
    "rows that are put where they came from, one by one": (
        one_by_one("a", "%p, %b"), Y, X, "gathers or scatters rows one by one",
    ),
    "rows that are put into another value, one by one": (
        one_by_one("b", "%p, %b"), Y, X, "carries state from row to row",
    ),
    "rows that are put, and changed, one by one": (
        one_by_one("a", "%g, %b"), Y, X, "carries state from row to row",
    ),
    "rows that are put into one of two values, one by one": (
        one_by_one("a", "%b, %p"), Y, X, "carries state from row to row",
    ),
    "blocks that are as many as are told apart": (
        blocks(15), Y, X, "",
    ),
    "more blocks than are told apart": (
        blocks(16), Y, X, "concatenates rows with other values",
    ),
    "rows beside the size of the batch": (
        "%n = stablehlo.constant dense<[B]> : tensor<1xi32>\n%f = stablehlo.convert %n : (tensor<1xi32>) -> tensor<1xf32>\n"
        f"%s = stablehlo.reshape %f : (tensor<1xf32>) -> tensor<f32>\n%d = stablehlo.broadcast_in_dim %s, dims = [] : (tensor<f32>) -> {SAME}\n"
        f"%z = stablehlo.divide %x, %d : {SAME}\n%y = stablehlo.negate %z : {SAME}",
        Y, X,
        "computes with the batch size",
    ),
    "a place that does not matter, of a slice": (
        PLACE + f"%y = stablehlo.dynamic_slice %x, %p, %o, sizes = [B, 2] : ({SAME}, tensor<i32>, tensor<i32>) -> tensor<Bx2xf32>",
        "%y : tensor<Bx2xf32>", X,
        "",
    ),
    "a place that does not matter, of what is put": (
        PLACE + "%u = stablehlo.constant dense<1.0> : tensor<Bx2xf32>\n"
        f"%y = stablehlo.dynamic_update_slice %x, %u, %p, %o : ({SAME}, tensor<Bx2xf32>, tensor<i32>, tensor<i32>) -> {SAME}",
        Y, X,
        "",
    ),
    "an output that is a number": (
        ZERO, "%z : tensor<f32>", X, "an output is a scalar",
    ),
    "an output as large as the batch twice": (
        "%y = stablehlo.broadcast_in_dim %x, dims = [0, 2] : (tensor<Bx4xf32>) -> tensor<BxBx4xf32>",
        "%y : tensor<BxBx4xf32>", X,
        "another dimension depends on the batch size",
    ),
    "an output of blocks": (
        "%y = stablehlo.reshape %x : (tensor<Bx4xf32>) -> tensor<4Bxf32>",
        "%y : tensor<4Bxf32>", X,
        "its rows are not the rows of the batch",
    ),
    "an output that lies": (
        TURNED, "%t : tensor<4xBxf32>", X, "its rows are not along the first dimension",
    ),
    "a branch that is known": (
        f'%c = stablehlo.constant dense<true> : tensor<i1>\n%r = stablehlo.reverse %x, dims = [0] : {SAME}\n'
        f'%y = "stablehlo.if"(%c) ({{ stablehlo.return %x : {SAME} }}, {{ stablehlo.return %r : {SAME} }}) : (tensor<i1>) -> {SAME}',
        Y, X,
        "",
    ),
    "the other branch that is known": (
        f'%c = stablehlo.constant dense<false> : tensor<i1>\n%r = stablehlo.reverse %x, dims = [0] : {SAME}\n'
        f'%y = "stablehlo.if"(%c) ({{ stablehlo.return %x : {SAME} }}, {{ stablehlo.return %r : {SAME} }}) : (tensor<i1>) -> {SAME}',
        Y, X,
        "reverses the order of the rows",
    ),
    "a branch that gives another number": (
        f"%r = stablehlo.reverse %x, dims = [0] : {SAME}\n%c = stablehlo.constant dense<3> : tensor<i32>\n%d = stablehlo.constant dense<5> : tensor<i32>\n"
        '%n = "stablehlo.if"(%p) ({ stablehlo.return %c : tensor<i32> }, { stablehlo.return %d : tensor<i32> }) : (tensor<i1>) -> tensor<i32>\n'
        "%q = stablehlo.compare EQ, %n, %c, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>\n"
        f"%y = stablehlo.select %q, %x, %r : tensor<i1>, {SAME}",
        Y, X + ", %p: tensor<i1>",
        "reverses the order of the rows",
    ),
    "branches that join what cannot be": (
        "%i = stablehlo.iota dim = 0 : tensor<Bx4xf32>\n"
        f'%y = "stablehlo.if"(%p) ({{ stablehlo.return %x : {SAME} }}, {{ stablehlo.return %i : {SAME} }}) : (tensor<i1>) -> {SAME}',
        Y, X + ", %p: tensor<i1>",
        "combines rows with values that depend on the batch index",
    ),
    "numbers of rows that cancel out beside a size": (
        "%r = stablehlo.iota dim = 0 : tensor<Bxi32>\n%b = stablehlo.constant dense<B> : tensor<Bxi32>\n"
        "%c = stablehlo.constant dense<3> : tensor<Bxi32>\n%m = stablehlo.minimum %n, %c : tensor<Bxi32>\n"
        "%s = stablehlo.add %r, %m : tensor<Bxi32>\n%t = stablehlo.add %s, %b : tensor<Bxi32>\n%y = stablehlo.subtract %t, %r : tensor<Bxi32>",
        "%y : tensor<Bxi32>", "%n: tensor<Bxi32>",
        "uses the batch size as a value",
    ),
    "a branch that each of three may be": (
        TOTAL + "%i = stablehlo.convert %q : (tensor<f32>) -> tensor<i32>\n"
        f'%y = "stablehlo.case"(%i) ({{ stablehlo.return %x : {SAME} }}, {{ stablehlo.return %x : {SAME} }}, {{ %other = stablehlo.tanh %x : {SAME} stablehlo.return %other : {SAME} }}) : (tensor<i32>) -> {SAME}',
        Y, X,
        "selects a branch by a value of several rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_a_rule_says_why(name: str) -> None:
    body, returned, arguments, reason = TABLE[name]

    said = verdict_of(body, returned, arguments).reason

    assert said.startswith(reason) if reason else said == ""
