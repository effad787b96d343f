"""A model's signature, from its configuration, its artifact or both."""

from collections.abc import Sequence
from dataclasses import dataclass

from xlaserve.errors import InvalidModel
from xlaserve.model_config.buckets import MAX_BATCH_SIZE
from xlaserve.model_config.config import ConfigTensor, ModelConfig
from xlaserve.tensors import Shape, TensorSpec, describe


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors of a model, and its batch size."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    """Maximum rows per request; 0 if requests are not batched or shapes are fixed."""

    @property
    def is_open(self) -> bool:
        """Tell whether the first dimension of all inputs is dynamic."""
        return bool(self.inputs) and all(spec.shape[:1] == (-1,) for spec in self.inputs)


def from_config(config: ModelConfig, *, is_code: bool = False) -> Signature:
    """Return the signature of a model from its configuration; raises InvalidModel if incomplete.

    A Python model (`is_code`) may lack either inputs or outputs.
    """
    config = config.of_artifact()
    batch = _batch_size(config.max_batch_size)
    may_lack = is_code and bool(config.inputs or config.outputs)
    for kind, tensors in (("input", config.inputs), ("output", config.outputs)):
        if not (tensors or may_lack):
            raise InvalidModel(f"the configuration must have at least one {kind}")
        _check_unique(kind, tensors)
    return Signature(
        tuple(_spec(tensor, batched=bool(batch)) for tensor in config.inputs),
        tuple(_spec(tensor, batched=bool(batch)) for tensor in config.outputs),
        batch,
    )


def agreed(artifact: Signature, config: ModelConfig) -> Signature:
    """Return the artifact's signature with the configuration's batch size.

    The configuration may omit tensors. A tensor that it lists must match the artifact's; otherwise
    InvalidModel names the tensor and both specs. Sequence controls and states are treated like
    other tensors.
    """
    config = config.of_artifact()
    batch = _batch_size(config.max_batch_size)
    if batch and not artifact.is_open:
        raise InvalidModel(
            f"the configuration has max_batch_size {batch}, but the artifact has fixed shapes "
            "and no batch dimension"
        )
    for kind, tensors, specs in (
        ("input", config.inputs, artifact.inputs),
        ("output", config.outputs, artifact.outputs),
    ):
        _check_unique(kind, tensors)
        for tensor in tensors:
            _check_tensor(kind, tensor, specs, config.max_batch_size, is_open=artifact.is_open)
        _check_all(kind, tensors, specs)
    if not batch and not config.is_unbatched:
        batch = artifact.max_batch_size
    return Signature(artifact.inputs, artifact.outputs, batch)


def _batch_size(max_batch_size: int) -> int:
    if not 0 <= max_batch_size <= MAX_BATCH_SIZE:
        raise InvalidModel(
            f"max_batch_size: expected 0 to {MAX_BATCH_SIZE}, got {max_batch_size} "
            "from the configuration"
        )
    return max_batch_size


def _check_unique(kind: str, tensors: Sequence[ConfigTensor]) -> None:
    names = [tensor.name for tensor in tensors]
    for name in names:
        if not name:
            raise InvalidModel(f"the configuration has an {kind} without a name")
        if names.count(name) > 1:
            raise InvalidModel(f"the configuration has {kind} '{name}' twice")


def _check_all(kind: str, tensors: Sequence[ConfigTensor], specs: Sequence[TensorSpec]) -> None:
    """Raise InvalidModel if a configuration lists only some of the inputs or outputs.

    A client that relies on such a list would send too few inputs, or get unexpected outputs.
    """
    named = {tensor.name for tensor in tensors}
    missing = [f"'{spec.name}'" for spec in specs if spec.name not in named]
    if tensors and missing:
        raise InvalidModel(
            f"the configuration lists {len(tensors)} {kind}s, expected none or the {len(specs)}"
            f" of the artifact; missing: {', '.join(missing)}"
        )


def _spec(tensor: ConfigTensor, *, batched: bool) -> TensorSpec:
    shape = (-1, *tensor.dims) if batched else tensor.dims
    return TensorSpec(tensor.name, tensor.datatype, shape)


def _check_tensor(
    kind: str,
    tensor: ConfigTensor,
    specs: Sequence[TensorSpec],
    config_batch: int,
    *,
    is_open: bool,
) -> None:
    spec = next((spec for spec in specs if spec.name == tensor.name), None)
    if spec is None:
        names = ", ".join(f"'{spec.name}'" for spec in specs)
        raise InvalidModel(f"{kind} '{tensor.name}' is not in the artifact, which has {names}")
    shapes = [tensor.dims]
    if is_open:
        # If the configuration sets no max_batch_size, dims may include the batch or not.
        shapes = [(-1, *tensor.dims)] if config_batch else [(-1, *tensor.dims), tensor.dims]
    if tensor.datatype is spec.datatype and any(_same(shape, spec.shape) for shape in shapes):
        return
    raise InvalidModel(
        f"{kind} '{tensor.name}': expected {spec} as in the artifact, "
        f"got {describe(tensor.datatype, shapes[0])} from the configuration"
    )


def _same(configured: Shape, exported: Shape) -> bool:
    return len(configured) == len(exported) and all(
        want in (-1, have) for want, have in zip(configured, exported, strict=True)
    )
