"""Resolves the input shapes of an import and its batch dimension."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from xlaserve.artifact.artifact import BATCH_DIMENSION
from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx.signature import DEFAULT_MAX_BATCH_SIZE, Inputs
from xlaserve.importers.pt2.guards import holds
from xlaserve.importers.pt2.program import Program
from xlaserve.tensors import TensorSpec, datatype_of

_TRIED_BATCHES = 128
"""Number of batch sizes to test guards with, if the batch is not limited."""
_OF_PYTORCH = 2
"""PyTorch's default minimum for symbols; programs with it accept size 1 as well."""


def resolve(
    program: Program, dimensions: Mapping[str, Sequence[int]], max_batch_size: int | None
) -> Inputs:
    """Resolve all sizes except the batch; raises InvalidModel that names a dynamic one.

    The batch is the symbol that is the first dimension of every input and occurs nowhere else.
    `dimensions` gives a symbol a size, or several sizes to compile programs for.
    """
    shapes = _shapes(program)
    symbols = _symbols(shapes)
    for name, sizes in dimensions.items():
        if name not in symbols:
            known = ", ".join(symbols) or "none"
            raise InvalidModel(f"the model has no dimension '{name}', it has {known}")
        for size in sizes:
            _check_range(program, name, size)
    batch = _batch(shapes, dimensions)
    settled: dict[str, tuple[int | str, ...]] = {
        name: tuple(
            -1 if size == batch else _size(name, size, dimensions, shapes) for size in shape
        )
        for name, shape in shapes.items()
    }
    compiled = {
        _identifier(name): tuple(sizes) for name, sizes in dimensions.items() if len(sizes) > 1
    }
    specs = tuple(_spec(program, name, shape) for name, shape in settled.items())
    rows = _max_batch(program, batch, max_batch_size)
    inputs = Inputs(specs, rows, tuple(settled.values()) if compiled else (), compiled)
    _check_guards(program, inputs)
    return inputs


def said_sizes(
    program: Program, sizes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the sizes of symbols, given input shapes.

    Raises InvalidModel for an unknown input, a wrong number of dimensions, and a symbol with two
    sizes. Fixed sizes are compared when the model is loaded.
    """
    shapes, found = _shapes(program), dict[str, tuple[int, ...]]()
    for name, declared in sizes.items():
        if name not in shapes:
            raise InvalidModel(f"unknown input '{name}', the model has {', '.join(shapes)}")
        if len(declared) != len(shapes[name]):
            raise InvalidModel(
                f"input '{name}': expected {len(shapes[name])} dimensions, got {len(declared)}"
            )
        for size, symbol in zip(declared, shapes[name], strict=True):
            if size == -1 or not isinstance(symbol, str):
                continue
            if found.setdefault(symbol, (size,)) != (size,):
                raise InvalidModel(
                    f"input '{name}': its dimension '{symbol}' is {size} here, but"
                    f" {found[symbol][0]} elsewhere"
                )
    return found


def _shapes(program: Program) -> dict[str, tuple[int | str, ...]]:
    """Return the shape of each input as integers and symbol names."""
    found = {}
    for name in program.inputs:
        sizes = program.graph.tensors[name].sizes
        for size in sizes:
            if isinstance(size, str) and not size.isidentifier():
                raise InvalidModel(
                    f"input '{name}': its size {size[:200]} is an expression: export the model"
                    " with a torch.export.Dim for each dimension, or fixed sizes"
                )
        found[name] = sizes
    if not found:
        raise InvalidModel("the model has no inputs")
    return found


def _symbols(shapes: Mapping[str, Sequence[int | str]]) -> list[str]:
    listed = [size for shape in shapes.values() for size in shape if isinstance(size, str)]
    return list(dict.fromkeys(listed))


def _batch(
    shapes: Mapping[str, Sequence[int | str]], dimensions: Mapping[str, Sequence[int]]
) -> str | None:
    """Return the symbol that is the batch dimension, or None."""
    first = {shape[0] if shape else 1 for shape in shapes.values()}
    if len(first) != 1:
        return None
    symbol = first.pop()
    if not isinstance(symbol, str) or symbol in dimensions:
        return None
    if any(symbol in shape[1:] for shape in shapes.values()):
        return None
    return symbol


def _size(
    name: str,
    size: int | str,
    dimensions: Mapping[str, Sequence[int]],
    shapes: Mapping[str, Sequence[int | str]],
) -> int | str:
    if isinstance(size, int):
        return size
    sizes = dimensions.get(size, ())
    if len(sizes) > 1:
        return _identifier(size)
    if sizes:
        return sizes[0]
    shown = ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
    raise InvalidModel(
        f"input '{name}': its dimension '{size}' is dynamic, but only the leading dimension of"
        f" every input may be: set a size with --dim {size}=SIZE, or several with --dim"
        f" {size}=SIZE,SIZE. The inputs are {shown}"
    )


def _identifier(name: str) -> str:
    return f"_{name}" if name == BATCH_DIMENSION else name


def _spec(program: Program, name: str, shape: Sequence[int | str]) -> TensorSpec:
    dtype = program.graph.tensors[name].dtype
    datatype = datatype_of(dtype)
    if datatype is None:
        raise InvalidModel(f"input '{name}' is {dtype}, which the V2 protocol does not have")
    return TensorSpec(name, datatype, tuple(-1 if isinstance(s, str) else s for s in shape))


def _check_range(program: Program, symbol: str, size: int) -> None:
    least, most = program.ranges.get(symbol, (0, None))
    if size < least or (most is not None and size > most):
        upper = "more" if most is None else str(most)
        raise InvalidModel(
            f"--dim {symbol}={size}: the program was exported for {least} to {upper}"
        )


def _max_batch(program: Program, batch: str | None, requested: int | None) -> int:
    """Return the largest batch, limited by the range that the program was exported for."""
    if batch is None:
        if requested:
            raise InvalidModel(
                f"--max-batch-size {requested}: expected a dynamic leading dimension in every"
                " input: export the model with dynamic_shapes={'x': {0: torch.export.Dim('batch')}}"
            )
        return 0
    least, most = program.ranges.get(batch, (0, None))
    if least > _OF_PYTORCH:
        raise InvalidModel(
            f"the program was exported for batches of {least} and more: export it again with "
            "torch.export.Dim('batch', min=1)"
        )
    rows = DEFAULT_MAX_BATCH_SIZE if requested is None else requested
    if most is None:
        return rows
    if requested == 0 or (requested is not None and requested > most):
        raise InvalidModel(
            f"--max-batch-size {requested}: the program was exported for {most} rows at most"
        )
    return min(rows, most)


def _check_guards(program: Program, inputs: Inputs) -> None:
    """Raise InvalidModel if a guard fails for any allowed size."""
    for shapes in _shapes_to_check(inputs):
        for guard in program.guards:
            if not holds(guard, shapes):
                raise InvalidModel(
                    f"the program requires {guard[:200]}, but shapes may be {shapes}: set"
                    " dimensions with --dim, or rows with --max-batch-size"
                )


def _shapes_to_check(inputs: Inputs) -> Iterator[Mapping[str, Sequence[int]]]:
    rows = range(1, (inputs.max_batch_size or _TRIED_BATCHES) + 1) if inputs.is_open else (1,)
    counts = max((len(sizes) for sizes in inputs.compiled.values()), default=1)
    for place in range(counts):
        sizes = {name: s[min(place, len(s) - 1)] for name, s in inputs.compiled.items()}
        specs = inputs.sized(MappingProxyType(sizes))
        for batch in rows:
            yield {
                spec.name: tuple(batch if size == -1 else size for size in spec.shape)
                for spec in specs
            }
