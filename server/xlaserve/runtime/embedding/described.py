"""Matches an embedding declaration with a model's tensors."""

from collections.abc import Sequence

from xlaserve.artifact.shapes import OpenDimensions
from xlaserve.artifact.signature import Signature
from xlaserve.errors import InvalidModel
from xlaserve.runtime.embedding.declared import Declared
from xlaserve.runtime.embedding.info import EmbeddingInfo
from xlaserve.tensors import TensorSpec

_IDS = frozenset({"INT32", "INT64"})
_MARKS = frozenset({"INT32", "INT64", "BOOL", "FP32"})
_MASK, _TYPES = "attention_mask", "token_type_ids"
"""Default names of the attention mask's and the token types' inputs."""
_RANK = 2


def describe(
    declared: Declared, signature: Signature, dimensions: OpenDimensions, *, on_demand: bool
) -> EmbeddingInfo:
    """Describe an embedding model, given its compiled sizes; raises InvalidModel."""
    declaration, place = declared.declaration, declared.place
    inputs = {spec.name: spec for spec in signature.inputs}
    mask = _named(place, "mask", declaration.mask, inputs, _MASK)
    types = _named(place, "types", declaration.types, inputs, _TYPES)
    others = [spec for spec in inputs.values() if spec not in (mask, types)]
    tokens = _one(place, "tokens", declaration.tokens, others)
    extra = [spec.name for spec in others if spec is not tokens]
    if extra:
        raise InvalidModel(
            f"{place}: expected only inputs for tokens, mask and types, got also '{extra[0]}'"
        )
    for spec, kinds in ((tokens, _IDS), (mask, _MARKS), (types, _IDS)):
        if spec is not None:
            _check(place, spec, kinds, tokens)
    output = _one(place, "output", declaration.output, signature.outputs)
    if output.datatype.name != "FP32" or len(output.shape) != _RANK or output.shape[1] < 1:
        raise InvalidModel(
            f"{place}: output '{output.name}': expected FP32[-1,N], one embedding for each row, "
            f"got {output}"
        )
    lengths = _lengths(signature.inputs.index(tokens), tokens, dimensions)
    most = _most_tokens(declared, lengths, on_demand=on_demand)
    return EmbeddingInfo(
        tokens,
        mask,
        types,
        output,
        lengths,
        most,
        declaration.vocab,
        declaration.pad,
        _cuts(declared, output.shape[1]),
        declaration.prompt,
        declared.text,
        declared.no_text,
        declared.written_at,
        declared.files,
    )


def _named(
    place: str, role: str, name: str, inputs: dict[str, TensorSpec], default: str
) -> TensorSpec | None:
    if not name:
        return inputs.get(default)
    if name not in inputs:
        raise InvalidModel(
            f"{place}: {role}: expected one of {', '.join(inputs)}, got '{name[:64]}'"
        )
    return inputs[name]


def _one(place: str, role: str, name: str, among: Sequence[TensorSpec]) -> TensorSpec:
    """Return the tensor with this name, or the only one if no name is given."""
    found = [spec for spec in among if not name or spec.name == name]
    if len(found) == 1:
        return found[0]
    known = ", ".join(spec.name for spec in among) or "none"
    raise InvalidModel(f"{place}: {role}: expected the name of one of {known}, got '{name[:64]}'")


def _check(place: str, spec: TensorSpec, kinds: frozenset[str], tokens: TensorSpec) -> None:
    is_shaped = len(spec.shape) == _RANK and spec.shape[0] == -1 and spec.shape == tokens.shape
    if spec.datatype.name not in kinds or not is_shaped:
        raise InvalidModel(
            f"{place}: input '{spec.name}': expected {' or '.join(sorted(kinds))} of [-1,"
            f" tokens], all with the same shape, got {spec}"
        )


def _lengths(index: int, tokens: TensorSpec, dimensions: OpenDimensions) -> tuple[int, ...]:
    """Return the token counts compiled at load, ascending."""
    if tokens.shape[1] != -1:
        return (tokens.shape[1],)
    for of, axis, dimension in dimensions.places:
        if (of, axis) == (index, 1):
            return tuple(sorted({sizes[dimension] for sizes in dimensions.combinations}))
    return ()


def _most_tokens(declared: Declared, lengths: tuple[int, ...], *, on_demand: bool) -> int:
    most, place = declared.declaration.max_tokens, declared.place
    if most is None and lengths:
        return lengths[-1]
    if most is None:
        raise InvalidModel(
            f"{place}: max_tokens: expected a number, since no token length is compiled at load,"
            " got none"
        )
    if lengths and most > lengths[-1] and not on_demand:
        raise InvalidModel(
            f"{place}: max_tokens: expected at most {lengths[-1]}, the largest size that is "
            f"compiled, got {most}"
        )
    return most


def _cuts(declared: Declared, size: int) -> tuple[int, ...] | None:
    wanted = declared.declaration.dimensions
    if isinstance(wanted, bool):
        return None if wanted else ()
    if not all(1 <= one <= size for one in wanted):
        raise InvalidModel(
            f"{declared.place}: dimensions: expected sizes of 1 to {size}, got {wanted}"
        )
    return tuple(sorted(set(wanted)))
