"""Checks what the proof rules say about single operations against XLA's results.

Each operand is tested in every way in which a value can vary with the batch. `Sample` generates a
single program for all combinations.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.backend import get_backend

from support.row_texts import sized
from xlaserve.row_proofs import program, refining
from xlaserve.row_proofs.constants import Constant
from xlaserve.row_proofs.domain import ROWS, Along, Dimension, Factor, Value
from xlaserve.row_proofs.proof import PAIRS, followed

Array: TypeAlias = "np.ndarray[Any, Any]"
FEW, MANY = 1, 3
"""Batch sizes with which programs are run."""


@dataclass(frozen=True)
class Sample:
    """An operation and its operand types."""

    name: str
    attributes: str
    operands: Sequence[str]
    results: Sequence[str]
    region: str = ""
    kinds: Sequence[Sequence[str]] = ()
    """How each operand varies, for each combination to test; all combinations if empty."""

    @classmethod
    def read(cls, text: str) -> "Sample":
        """Parse `name | attributes | operand, operand -> result | region`, with bare types."""
        name, attributes, kinds, *region = (part.strip() for part in text.split("|"))
        before, after = (
            [one.strip() for one in side.split(",") if one.strip()] for side in kinds.split("->")
        )
        return cls(name, attributes, before, after, *region)

    @cached_property
    def variants(self) -> Sequence[Sequence[str]]:
        """Return the combinations to test: a single varying operand, or all operands alike."""
        if self.kinds:
            return self.kinds
        count = len(self.operands)
        found = [
            tuple(kind if place == other else "alike" for other in range(count))
            for place in range(count)
            for kind in _MAKERS
        ]
        found += [("rows",) * count, ("any",) * count]
        return [
            each
            for each in dict.fromkeys(found)
            if all(_is_possible(*both) for both in zip(each, self.operands, strict=True))
        ]

    def said(self) -> Mapping[str, str]:
        """Return the operand kinds of all combinations, grouped by what the rules say."""
        count = len(self.results)
        found: dict[str, list[str]] = {}
        for number, variant in enumerate(self.variants):
            values = self.values[number * count : (number + 1) * count]
            found.setdefault("; ".join(map(written, values)), []).append(" ".join(variant))
        return {said: ", ".join(kinds) for said, kinds in found.items()}

    @cached_property
    def values(self) -> Sequence[Value]:
        """Return what the proof knows about every result."""
        with refining.parsing():
            whole = range(len(self.variants) * len(self.results))
            modules = [refining.parse(self._text(rows, whole)) for rows in PAIRS[0]]
            read = program.read(modules[0], modules[1], PAIRS[0])
            return followed(read, self._batched)[1]

    def contradictions(self) -> Iterator[str]:
        """Yield each contradiction between the computed results and the rules."""
        random = np.random.default_rng(5)
        claimed = [place for place, value in enumerate(self.values) if value.blocked is None]
        if not claimed:
            return
        few, many = (self._compiled(rows, claimed) for rows in (FEW, MANY))
        inputs = [random.integers(-3, 4, shape).astype(np.float32) for shape in self._shapes(MANY)]
        others = [
            np.concatenate([one[2:] + 1, one[1:2], one[:1] - 1]) if place in self._batched else one
            for place, one in enumerate(inputs)
        ]
        together, beside = many(inputs), many(others)
        alone = [
            few([one[n : n + 1] if p in self._batched else one for p, one in enumerate(inputs)])
            for n in range(MANY)
        ]
        for number, place in enumerate(claimed):
            value = self.values[place]
            singles = [one[number] for one in alone]
            reason = contradiction(value, together[number], beside[number], singles)
            if reason:
                variant = self.variants[place // len(self.results)]
                yield f"{self.name} of {' '.join(variant)}: {written(value)}, but {reason}"

    @cached_property
    def _arguments(self) -> Mapping[str, str]:
        """Return argument types by name; names of batched arguments begin with `r`."""
        found: dict[str, str] = {}
        for variant in self.variants:
            for place, (kind, of) in enumerate(zip(variant, self.operands, strict=True)):
                shape, _ = _parts(of)
                if kind in {"rows", "mixed"}:
                    rest = [one for n, one in enumerate(shape) if n != _batch(shape)]
                    found[f"r{place}"] = "x".join(["B", *rest, "f32"])
                elif kind == "any":
                    found[f"p{place}"] = "x".join(
                        [*(one for one in shape if "B" not in one), "f32"]
                    )
        return dict(sorted(found.items(), reverse=True))

    @property
    def _batched(self) -> list[int]:
        return [n for n, name in enumerate(self._arguments) if name.startswith("r")]

    def _shapes(self, rows: int) -> list[tuple[int, ...]]:
        return [
            tuple(rows if one == "B" else int(one) for one in _parts(of)[0])
            for of in self._arguments.values()
        ]

    def _text(self, rows: int, places: Collection[int]) -> str:
        """Return the text of the program that returns the results with these indices."""
        lines: list[str] = []
        for number, variant in enumerate(self.variants):
            names = [f"%o{number}_{place}" for place in range(len(variant))]
            for place, (kind, of) in enumerate(zip(variant, self.operands, strict=True)):
                lines += _made(names[place], kind, of, place)
            kinds = ", ".join(f"tensor<{one}>" for one in self.operands)
            results = ", ".join(f"tensor<{one}>" for one in self.results)
            several = f":{len(self.results)}" if len(self.results) > 1 else ""
            region = f"({{{self.region}}})" if self.region else ""
            attributes = f"<{{{self.attributes}}}>" if self.attributes else ""
            lines.append(
                f'%y{number}{several} = "{self.name}"({", ".join(names)}) '
                f"{attributes} {region} : ({kinds}) -> ({results})"
            )
        count = len(self.results)
        types = ", ".join(f"tensor<{self.results[place % count]}>" for place in places)
        names = [f"%y{place // count}" for place in places]
        if count > 1:
            names = [f"{name}#{place % count}" for name, place in zip(names, places, strict=True)]
        returned = ", ".join(names)
        arguments = ", ".join(f"%{name}: tensor<{of}>" for name, of in self._arguments.items())
        body = "\n".join(lines)
        return sized(
            f"func.func public @main({arguments}) -> ({types}) {{\n{body}\n"
            f"return {returned} : {types}\n}}",
            rows,
        )

    def _compiled(
        self, rows: int, places: Collection[int]
    ) -> Callable[[Sequence[Array]], Sequence[Array]]:
        backend = get_backend("cpu")
        text = f"module {{ {self._text(rows, places)} }}"
        executable = backend.compile_and_load(text.encode(), backend.local_devices()[:1])

        def call(inputs: Sequence[Array]) -> Sequence[Array]:
            return [
                np.asarray(one) for one in executable.execute(list(map(jax.device_put, inputs)))
            ]

        return call


def _parts(of: str) -> tuple[list[str], str]:
    *shape, dtype = re.split("x(?!<)", of)
    return shape, dtype


def _batch(shape: Sequence[str]) -> int | None:
    return next((n for n, one in enumerate(shape) if one == "B"), None)


def _is_possible(kind: str, of: str) -> bool:
    shape, _ = _parts(of)
    if kind in {"rows", "counted"}:
        return _batch(shape) is not None
    return kind != "any" or any("B" not in one for one in shape)


def _made(name: str, kind: str, of: str, place: int) -> list[str]:
    """Return the lines that create an operand."""
    return _MAKERS[kind](name, of, place)


def _converted(name: str, of: str) -> str:
    shape, _ = _parts(of)
    plain = "x".join([*shape, "f32"])
    return f"{name} = stablehlo.convert {name}f : (tensor<{plain}>) -> tensor<{of}>"


def _plain(of: str) -> str:
    return "x".join([*_parts(of)[0], "f32"])


def _rows(name: str, of: str, place: int) -> list[str]:
    shape, _ = _parts(of)
    axis = shape.index("B")
    order = [0 if n == axis else n + (n < axis) for n in range(len(shape))]
    given = "x".join(["B", *(one for n, one in enumerate(shape) if n != axis), "f32"])
    return [
        f"{name}f = stablehlo.transpose %r{place}, dims = {order} : "
        f"(tensor<{given}>) -> tensor<{_plain(of)}>",
        _converted(name, of),
    ]


def _any(name: str, of: str, place: int) -> list[str]:
    shape, _ = _parts(of)
    axes = [n for n, one in enumerate(shape) if "B" not in one]
    given = "x".join([*(shape[n] for n in axes), "f32"])
    return [
        f"{name}f = stablehlo.broadcast_in_dim %p{place}, dims = {axes} : "
        f"(tensor<{given}>) -> tensor<{_plain(of)}>",
        _converted(name, of),
    ]


def _alike(name: str, of: str, place: int) -> list[str]:
    del place
    _, dtype = _parts(of)
    if "complex" in dtype:
        return [
            f"{name}f = stablehlo.constant dense<2.0> : tensor<{_plain(of)}>",
            _converted(name, of),
        ]
    number = {"f32": "2.0", "i1": "true"}.get(dtype, "1")
    return [f"{name} = stablehlo.constant dense<{number}> : tensor<{of}>"]


def _counted(name: str, of: str, place: int) -> list[str]:
    del place
    shape, dtype = _parts(of)
    axis = shape.index("B")
    if dtype != "i1":
        return [f"{name} = stablehlo.iota dim = {axis} : tensor<{of}>"]
    return [f"{name}f = stablehlo.iota dim = {axis} : tensor<{_plain(of)}>", _converted(name, of)]


def _sized(name: str, of: str, place: int) -> list[str]:
    del place
    _, dtype = _parts(of)
    return [
        f"{name}n = stablehlo.constant dense<[B]> : tensor<1xi32>",
        f"{name}g = stablehlo.reshape {name}n : (tensor<1xi32>) -> tensor<i32>",
        f"{name}h = stablehlo.convert {name}g : (tensor<i32>) -> tensor<{dtype}>",
        f"{name} = stablehlo.broadcast_in_dim {name}h, dims = [] : "
        f"(tensor<{dtype}>) -> tensor<{of}>",
    ]


def _mixed(name: str, of: str, place: int) -> list[str]:
    shape, _ = _parts(of)
    given = "x".join(["B", *(one for n, one in enumerate(shape) if n != _batch(shape)), "f32"])
    axes = list(range(given.count("x")))
    return [
        f"{name}z = stablehlo.constant dense<0.0> : tensor<f32>",
        f"{name}s = stablehlo.reduce(%r{place} init: {name}z) applies stablehlo.add across "
        f"dimensions = {axes} : (tensor<{given}>, tensor<f32>) -> tensor<f32>",
        f"{name}f = stablehlo.broadcast_in_dim {name}s, dims = [] : "
        f"(tensor<f32>) -> tensor<{_plain(of)}>",
        _converted(name, of),
    ]


_MAKERS: Mapping[str, Callable[[str, str, int], list[str]]] = MappingProxyType(
    {
        "rows": _rows,
        "any": _any,
        "alike": _alike,
        "counted": _counted,
        "sized": _sized,
        "mixed": _mixed,
    }
)
"""How an operand can vary: row by row, in any way but with the batch, not at all, along the batch,
with the batch size, and as a mixture of several rows.
"""


# --- Claims and results --------------------------------------------------------------------------


def dimension_text(dimension: Dimension) -> str:
    """Format a dimension's factors: `R` for rows, `4*` for one along which values vary."""

    def of(one: Factor) -> str:
        count = f"{one.size.per_row}b".removeprefix("1") if one.size.per_row else one.size.fixed
        return f"{count}{'*' if one.along else ''}"

    return " ".join("R" if one == ROWS else of(one) for one in dimension)


def written(value: Value) -> str:
    """Format what is known about a value, or why nothing is known."""
    if value.blocked is not None:
        return f"{value.blocked.operation.partition('.')[2]}: {value.blocked.reason}"
    found = "[" + ", ".join(map(dimension_text, value.dimensions)) + "]"
    if isinstance(value.fact, Constant) and value.fact.item() is not None:
        found = f"{found} = {value.fact.item()}"
    if value.sized is None:
        return found
    return f"{found}, {value.sized.operation.partition('.')[2]}: {value.sized.reason}"


def contradiction(value: Value, together: Array, beside: Array, alone: Sequence[Array]) -> str:
    """Return how the results contradict what is known; empty if they do not.

    `beside` comes from a batch in which all rows but the second are different.
    """
    factors = [part for dimension in value.dimensions for part in dimension]
    shapes = [[part.size.at(rows) for part in factors] for rows in (MANY, FEW)]
    whole, other = (np.reshape(one, shapes[0]) for one in (together, beside))
    singles = [np.reshape(one, shapes[1]) for one in alone]
    for axis, part in enumerate(factors):
        if (
            part.along is Along.UNIFORM
            and whole.size
            and not _is_alike(whole, whole.take([0], axis))
        ):
            return f"it varies along {part}"
    rows = next((n for n, part in enumerate(factors) if part.along is Along.ROW), None)
    if not _is_alike(*(one if rows is None else one.take(1, rows) for one in (whole, other))):
        return "it changes with the rows beside it"
    item = value.fact.item() if isinstance(value.fact, Constant) else None
    if item is not None and not (whole == item).all():
        return "it is another number"
    if value.sized is not None:
        return ""
    for number, single in enumerate(singles):
        part_of = whole if rows is None else whole.take([number], rows)
        # Dimensions that grow with the batch are compared up to the smaller size.
        places = tuple(slice(0, count) for count in single.shape)
        if not _is_alike(part_of[places], single):
            return f"row {number} is not what it is alone"
    return ""


def _is_alike(one: Array, other: Array) -> bool:
    return np.allclose(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


def table(path: Path) -> Mapping[str, Mapping[str, str]]:
    """Read samples, each with what the rules say and the operand kinds it applies to."""
    found: dict[str, dict[str, str]] = {}
    rows: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if not line.startswith(" "):
            rows = found[line] = {}
            continue
        kinds, _, said = line[2:].partition(" => ")
        rows[said] = kinds
    return found
