"""Reads the files of a version and checks them against each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jax.export import Exported

from xlaserve.artifact import artifact, manifest, shapes, weights
from xlaserve.artifact.artifact import Keyed
from xlaserve.artifact.manifest import Manifest
from xlaserve.artifact.signature import Signature, agreed
from xlaserve.artifact.weights import WeightEntry
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.devices import placement
from xlaserve.runtime.devices.placement import Placement
from xlaserve.runtime.devices.sites import Layout


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """Contents of a version's files, except for parameter values."""

    config: ModelConfig
    """The configuration, completed from the manifest."""
    signature: Signature
    placement: Placement
    computation: Keyed
    entries: Sequence[WeightEntry] = ()
    described: Manifest | None = None
    """The manifest; None for a single-file model without parameters."""

    def check_layout(self, layout: Layout) -> None:
        """Raise InvalidModel unless every partition rule fits the parameters."""
        for site in layout.sites:
            site.check({entry.name: entry.shape for entry in self.entries})


def read(
    directory: Path,
    config: ModelConfig,
    platform: str,
    roots: Roots = ANYWHERE,
    known: Callable[[str], Exported | None] = lambda key: None,
) -> VersionFiles:
    """Read everything but the parameters, for a server of this platform; raises InvalidModel.

    `known` may already contain the computation; see `artifact.read_keyed`.
    """
    described = manifest.read(directory, roots)
    config = config.with_defaults(described.defaults)
    if described.steps is None:
        signature = agreed(Signature(*described.known, described.max_batch_size), config)
    else:
        # The step's batch dimension is internal: clients do not see it and no configuration sets
        # it.
        agreed(Signature(*described.known, 0), config)
        signature = Signature(described.inputs, described.outputs, described.max_batch_size)
    wanted = placement.read(config, platform)
    computation = artifact.read_keyed(directory, described, roots, known)
    entries = weights.read_entries(directory, manifest.WEIGHTS, roots)
    sized = shapes.is_sized(config)
    artifact.check(computation.exported, described, entries, wanted.platform, sized=sized)
    return VersionFiles(config, signature, wanted, computation, entries, described)
