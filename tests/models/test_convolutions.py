# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax

from xlaserve.authoring.cpu import convolutions
from xlaserve.authoring.cpu.convolutions import Convolution, convolve, form_of
from xlaserve.authoring.cpu.optimizing import optimize
from xlaserve.row_proofs import prove
from xlaserve.row_proofs.verdict import Independence

DEPTHWISE = Convolution.plain((1, 1), [(1, 1), (1, 1)], groups=4)
POINTWISE = Convolution.plain((1, 1), [(0, 0), (0, 0)])
IMAGE = jax.ShapeDtypeStruct((1, 4, 6, 6), jnp.float32)
KERNEL = jax.ShapeDtypeStruct((4, 1, 3, 3), jnp.float32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Convolution, tuple[int, ...], tuple[int, ...]]:
    """Draw any convolution with an image and a kernel, of one to three dimensions."""
    rank = draw(st.integers(1, 3))

    def several(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    groups, inputs, outputs = (draw(st.integers(1, 3)) for _ in range(3))
    padding = list(zip(several(-1, 3), several(-1, 3), strict=True))
    order = draw(st.sampled_from((tuple(range(rank + 2)), (0, rank + 1, *range(1, rank + 1)))))
    result = draw(st.sampled_from((tuple(range(rank + 2)), (0, rank + 1, *range(1, rank + 1)))))
    kernel_order = draw(st.sampled_from((tuple(range(rank + 2)), (rank + 1, rank, *range(rank)))))
    convolution = Convolution(
        several(1, 3),
        padding,
        several(1, 3),
        several(1, 2),
        lax.ConvDimensionNumbers(order, kernel_order, result),
        groups,
    )
    image = _placed((draw(st.integers(1, 2)), groups * inputs, *several(3, 6)), order)
    kernel = _placed((groups * outputs, inputs, *several(1, 3)), kernel_order)
    return convolution, image, kernel


def _placed(sizes: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    shape = [0] * len(sizes)
    for size, axis in zip(sizes, order, strict=True):
        shape[axis] = size
    return tuple(shape)


def _drawn(shape: Sequence[int], dtype: Any, seed: int = 0) -> jax.Array:
    random = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        return jnp.asarray(random.integers(0, 100, shape), dtype)
    return jnp.asarray(random.standard_normal(shape), dtype)


Case: TypeAlias = tuple[Convolution, tuple[int, ...], tuple[int, ...]]
MOST = st.sampled_from((1, convolutions.MAX_PRODUCTS))
"""With few products allowed, groups are split."""


UNEVEN: Case = (
    Convolution(
        (2, 3),
        ((-1, 2), (3, 0)),
        (2, 1),
        (2, 3),
        lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 1, 2, 3)),
        2,
    ),
    (2, 6, 9, 4),
    (2, 3, 2, 6),
)
"""Every attribute is another one, in each dimension."""


_LAST = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
VECTORS: Case = (
    Convolution((2, 3), ((1, 2), (0, 1)), (1, 1), (1, 1), _LAST),
    (2, 6, 9, 4),
    (1, 1, 4, 5),
)
"""A product of each pixel of those that are met."""
COLUMNS: Case = (
    Convolution((2, 1), ((1, 2), (0, 1)), (1, 1), (1, 2), _LAST),
    (2, 6, 9, 4),
    (3, 2, 4, 5),
)
"""A product of all that the kernel meets at each pixel of the result."""
GROUPED_VECTORS: Case = replace(VECTORS[0], groups=2), (2, 6, 9, 4), (1, 1, 2, 6)


@settings(max_examples=4, deadline=None)
@example(VECTORS, convolutions.MAX_PRODUCTS)
@example(GROUPED_VECTORS, convolutions.MAX_PRODUCTS)
@example(COLUMNS, convolutions.MAX_PRODUCTS)
@example(UNEVEN, 1)
@example(UNEVEN, convolutions.MAX_PRODUCTS)
@given(cases(), MOST)
def test_every_form_gives_what_one_convolution_gives(case: Case, most: int) -> None:
    """Strides, dilations, paddings, groups and layouts, a few of them."""
    _check_form(case, most)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cases(), MOST)
def test_every_form_gives_what_one_convolution_gives_at_length(case: Case, most: int) -> None:
    _check_form(case, most)


def test_a_negative_padding_takes_away_from_the_image() -> None:
    """XLA's own convolution reads beside it in jaxlib 0.10, where both sides add up to nothing."""
    image, kernel = _drawn((2, 3, 6), np.float32), _drawn((8, 3, 3), np.float32, 1)
    left = Convolution.plain((1,), [(0, 1)])(image[:, :, 1:], kernel)

    for form in (Convolution.__call__, convolve):
        got = jax.jit(partial(form, Convolution.plain((1,), [(-1, 1)])))(image, kernel)
        np.testing.assert_allclose(got, left, rtol=1e-5, atol=1e-5)


def _check_form(case: Case, most: int) -> None:
    convolution, *shapes = case
    image, kernel = (_drawn(shape, np.float32, n) for n, shape in enumerate(shapes))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(convolutions, "MAX_PRODUCTS", most)
        patched.setattr(convolutions, "MIN_COLUMN_FEATURES", 1)
        got = jax.jit(lambda x, w: convolve(convolution, x, w))(image, kernel)

    expected = convolution(image, kernel)
    assert (expected.shape, expected.dtype) == (got.shape, got.dtype)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("convolution", [DEPTHWISE, replace(POINTWISE, groups=2)])
def test_numbers_of_any_width_are_summed_as_in_one_convolution(
    convolution: Convolution, dtype: Any
) -> None:
    """Integers wrap around or are widened, halves are summed in FP32."""
    window = (3, 3) if convolution is DEPTHWISE else (1, 1)
    kernel = _drawn((4, 4 // convolution.groups, *window), dtype, 1)
    image = _drawn((2, 4, 6, 6), dtype)
    wide = jnp.int32 if np.dtype(dtype).kind in "iu" else jnp.float32

    for asked in (convolution, replace(convolution, dtype=wide)):
        got, expected = convolve(asked, image, kernel), asked(image, kernel)

        assert expected.dtype == got.dtype
        tolerance = 1e-2 if got.dtype.itemsize == 2 else 1e-5
        np.testing.assert_allclose(
            np.asarray(got, np.float64), np.asarray(expected, np.float64), tolerance, tolerance
        )


def test_sums_of_halves_lose_nothing_on_the_way() -> None:
    """2049 ones are 2048 where each sum is rounded to FP16."""
    convolution = Convolution.plain((1,), [(0, 0)], groups=1)
    convolution = replace(convolution, groups=2)
    image = jnp.concatenate([jnp.full((1, 2, 1), 2048.0), jnp.ones((1, 2, 7))], 2)

    got = convolve(convolution, image.astype(jnp.float16), jnp.ones((2, 1, 8), jnp.float16))

    assert [[2056.0], [2056.0]] == got[0].tolist()


def _winograd_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the smallest of convolutions have Winograd's form."""
    monkeypatch.setattr(convolutions, "MIN_WINOGRAD_CHANNELS", 1)
    monkeypatch.setattr(convolutions, "MIN_WINOGRAD_MULTIPLICATIONS", 1)


SQUARE = Convolution((1, 1), ((1, 1), (1, 1)), (1, 1), (1, 1), _LAST)
"""A kernel of 3 x 3 that leaves an image of its size."""
SIDES = st.integers(1, 9)
EDGES = st.tuples(st.integers(-1, 4), st.integers(-1, 4))
ORDERS = st.sampled_from(((3, 2, 0, 1), (0, 1, 2, 3), (2, 0, 1, 3)))


@settings(max_examples=12, deadline=None)
@example(((0, 0), (0, 0)), (2, 3, 3), (1, 1), (3, 2, 0, 1))
@example(((1, 0), (-1, 2)), (3, 5, 8), (2, 3), (0, 1, 2, 3))
@given(
    st.tuples(EDGES, EDGES),
    st.tuples(st.integers(1, 3), SIDES, SIDES),
    st.tuples(SIDES, SIDES),
    ORDERS,
)
def test_winograd_gives_what_one_convolution_gives(
    padding: Any, sizes: tuple[int, int, int], channels: tuple[int, int], order: tuple[int, ...]
) -> None:
    """Odd sizes, paddings of any kind, and any order of the kernel's dimensions."""
    rows, *sides = sizes
    numbers = lax.ConvDimensionNumbers(_LAST.lhs_spec, order, _LAST.out_spec)
    convolution = replace(SQUARE, padding=padding, numbers=numbers)
    image = _drawn((rows, *sides, channels[0]), np.float32)
    kernel = _drawn(_placed((channels[1], channels[0], 3, 3), order), np.float32, 1)

    with pytest.MonkeyPatch.context() as patched:
        _winograd_forms(patched)
        patched.setattr(convolutions, "MIN_COLUMN_FEATURES", 1 << 20)
        form = form_of(convolution, image, kernel)
        if min(convolution.positions(image, kernel)) <= 0:
            assert form is None
            return
        assert form is not None
        assert "_winograd" == getattr(form, "__name__", "")
        got = jax.jit(lambda x, w: convolve(convolution, x, w))(image, kernel)

    expected = convolution(image, kernel)
    assert (expected.shape, expected.dtype) == (got.shape, got.dtype)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-5)


OTHERS: dict[str, tuple[dict[str, Any], tuple[int, ...], Any]] = {
    "strides": ({"strides": (1, 2)}, (3, 3, 96, 96), np.float32),
    "a dilated image": ({"image_dilation": (2, 1)}, (3, 3, 96, 96), np.float32),
    "a dilated kernel": ({"kernel_dilation": (1, 2)}, (3, 3, 96, 96), np.float32),
    "a large kernel": ({}, (5, 5, 96, 96), np.float32),
    "a long kernel": ({}, (3, 1, 96, 96), np.float32),
    "few features": ({}, (3, 3, 96, 95), np.float32),
    "halves": ({}, (3, 3, 96, 96), np.float16),
    "halves, summed in FP32": ({"dtype": np.float32}, (3, 3, 96, 96), np.float16),
    "wide numbers": ({"dtype": np.float64}, (3, 3, 96, 96), np.float32),
    "exact products": ({"precision": lax.Precision.HIGHEST}, (3, 3, 96, 96), np.float32),
    "channels in front": (
        {"numbers": lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 1, 2, 3))},
        (3, 3, 96, 96),
        np.float32,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_winograd_is_for_what_it_computes_alone(name: str) -> None:
    changed, shape, dtype = OTHERS[name]
    given = jax.ShapeDtypeStruct((1, 32, 32, 96), dtype), jax.ShapeDtypeStruct(shape, dtype)
    usual = (
        jax.ShapeDtypeStruct((1, 32, 32, 96), np.float32),
        jax.ShapeDtypeStruct((3, 3, 96, 96), np.float32),
    )

    assert "_winograd" == getattr(form_of(SQUARE, *usual), "__name__", "")  # type: ignore[arg-type]
    assert form_of(replace(SQUARE, **changed), *given) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("side", "channels", "features", "is_quicker"),
    [
        (14, 256, 256, True),
        (56, 96, 96, True),
        (13, 96, 96, False),  # too few multiplications
        (20, 95, 256, False),  # too few channels
        (74, 96, 96, False),  # too many numbers
    ],
)
def test_winograd_is_for_what_it_computes_quicker(
    side: int, channels: int, features: int, is_quicker: bool
) -> None:
    """For any batch: an export leaves it open."""
    [rows] = jax.export.symbolic_shape("b")
    image = jax.ShapeDtypeStruct((rows, side, side, channels), np.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, channels, features), np.float32)

    found = form_of(SQUARE, image, kernel)  # type: ignore[arg-type]

    assert is_quicker == (found is not None)


def test_a_number_that_is_not_finite_stays_in_its_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it touches in a convolution is not finite in Winograd's form either; others are."""
    _winograd_forms(monkeypatch)
    image, kernel = _drawn((2, 9, 9, 3), np.float32), _drawn((3, 3, 3, 4), np.float32, 1)
    image = image.at[0, 4, 4, 1].set(np.inf)

    got, expected = convolve(SQUARE, image, kernel), SQUARE(image, kernel)

    assert not np.isfinite(np.asarray(got)[~np.isfinite(expected)]).any()
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-4, atol=1e-5)


LEFT = {
    "a plain convolution": (replace(DEPTHWISE, groups=1), (1, 4, 6, 6), (4, 4, 3, 3), np.float32),
    "complex numbers": (DEPTHWISE, (1, 4, 6, 6), (4, 1, 3, 3), np.complex64),
    "an empty result": (DEPTHWISE, (1, 4, 1, 6), (4, 1, 9, 3), np.float32),
    "a pointwise one of integers": (POINTWISE, (1, 4, 6, 6), (4, 4, 1, 1), np.int32),
    "too many of both": (
        replace(DEPTHWISE, groups=65),
        (1, 65, 20, 20),
        (65, 1, 12, 12),
        np.float32,
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_convolutions_stay_what_they_are(name: str) -> None:
    convolution, image, kernel, dtype = LEFT[name]

    found = form_of(
        convolution,
        jnp.zeros(image, dtype),
        jnp.zeros(kernel, dtype),
    )

    assert found is None


def _text(function: Callable[..., Any], platform: str, *arguments: Any) -> str:
    return str(jax.export.export(jax.jit(function), platforms=[platform])(*arguments).mlir_module())


def _windows(text: str) -> list[str]:
    return [
        line.split("stablehlo.")[1] for line in text.splitlines() if "stablehlo.convolution" in line
    ]


def test_only_the_cpu_computes_products() -> None:
    """A GPU gets the very same convolution, and nothing that multiplies or pads."""

    quick = optimize(DEPTHWISE.__call__)
    cuda = _text(quick, "cuda", IMAGE, KERNEL)

    assert 1 == len(_windows(cuda))
    attributes = [
        _windows(text)[0].partition(")")[2].partition(" loc")[0]
        for text in (cuda, _text(DEPTHWISE.__call__, "cuda", IMAGE, KERNEL))
    ]
    assert attributes[0] == attributes[1]
    assert "multiply" not in cuda
    assert "stablehlo.pad" not in cuda
    assert not _windows(_text(quick, "cpu", IMAGE, KERNEL))


def test_only_the_cpu_has_winograd() -> None:
    """A GPU, and what is not optimized, keep one convolution of the kernel as it is."""
    given = (
        jax.ShapeDtypeStruct((1, 128, 20, 20), np.float32),
        jax.ShapeDtypeStruct((128, 128, 3, 3), np.float32),
    )
    plain = replace(DEPTHWISE, groups=1).__call__
    found = {
        (platform, is_optimized): _text(
            optimize(plain) if is_optimized else plain, platform, *given
        )
        for platform in ("cpu", "cuda")
        for is_optimized in (True, False)
    }

    for described, text in found.items():
        is_winograd = ("cpu", True) == described
        assert (0 if is_winograd else 1) == len(_windows(text))
        assert (4 if is_winograd else 0) == text.count("stablehlo.dot_general")


FORMS = {
    "products": (DEPTHWISE, (4, 1, 3, 3)),
    "split": (Convolution.plain((2, 1), [(6, 6), (6, 6)], groups=2), (4, 2, 12, 12)),
    "pointwise": (POINTWISE, (5, 4, 1, 1)),
    "columns": (replace(DEPTHWISE, groups=1), (5, 4, 3, 3)),
    "winograd": (replace(DEPTHWISE, groups=1), (5, 4, 3, 3)),
}


@pytest.mark.parametrize(
    ("side", "features", "has_columns"), [(7, 64, True), (9, 64, False), (7, 63, False)]
)
def test_a_small_image_of_many_features_is_one_product(
    side: int, features: int, has_columns: bool
) -> None:
    plain = replace(DEPTHWISE, groups=1, numbers=_LAST)
    image = jnp.zeros((1, side, side, features), jnp.float32)
    kernel = jnp.zeros((3, 3, features, 8), jnp.float32)

    made = jax.jit(partial(convolve, plain)).lower(image, kernel).as_text()

    assert has_columns == ("stablehlo.convolution" not in made)
    assert has_columns == ("stablehlo.dot_general" in made)


def test_what_a_place_has_for_neighbouring_features_lies_side_by_side() -> None:
    """Else a loop over features reads the kernel one by one, which takes ten times as long."""
    image = jax.ShapeDtypeStruct((1, 8, 8, 48), jnp.float32)
    last = lax.ConvDimensionNumbers((0, 3, 1, 2), (0, 1, 2, 3), (0, 3, 1, 2))
    depthwise = replace(DEPTHWISE, numbers=last, groups=48)

    kernel = jax.ShapeDtypeStruct((48, 1, 3, 3), jnp.float32)

    made = jax.jit(partial(convolve, depthwise)).lower(image, kernel).compile().as_text()

    taken = re.findall(r"f32\[(\S+) slice\(", str(made))
    assert 9 == taken.count("1,1,1,48,1]{4,3,2,1,0}")
    assert 9 == taken.count("1,8,8,48,1]{4,3,2,1,0}")


@pytest.mark.parametrize("name", FORMS)
def test_rows_are_proved_independent_in_every_form_on_every_platform(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "winograd":
        _winograd_forms(monkeypatch)
    else:
        monkeypatch.setattr(convolutions, "MIN_COLUMN_FEATURES", 4)
    convolution, shape = FORMS[name]
    (rows,) = jax.export.symbolic_shape("b")
    arguments = (
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct((rows, 4, 6, 6), jnp.float32),
    )

    def function(kernel: jax.Array, image: jax.Array) -> jax.Array:
        return convolution(image, kernel)

    exported = jax.export.export(jax.jit(optimize(function)), platforms=["cpu", "cuda"])(*arguments)
    found = prove(exported, 1, ["y"], {})
    kernel, image = _drawn(shape, np.float32), _drawn((3, 4, 6, 6), np.float32)

    assert Independence.PROVED is found.independence
    np.testing.assert_allclose(
        exported.call(kernel, image), convolution(image, kernel), rtol=1e-4, atol=1e-5
    )
