"""Computes a key that is equal for loads that need the same memory."""

import hashlib
from dataclasses import replace
from pathlib import Path

from xlaserve.artifact import manifest
from xlaserve.files.roots import Roots
from xlaserve.model_config.config import ModelConfig, VersionPolicy


def load_key(path: Path, config: ModelConfig, roots: Roots) -> str | None:
    """Hash a load's computation, sizes and placement, from headers alone. Blocks.

    Uses the hash of the computation in the manifest; returns None if there is no manifest. Raises
    InvalidModel if the manifest cannot be read.
    """
    if not (path / manifest.FILE_NAME).exists():
        return None
    described = manifest.read(path, roots)
    record = described.files.get(manifest.STABLEHLO) or described.files[manifest.ARTIFACT]
    groups = () if config.message is None else config.message.instance_group
    relevant = replace(config, name="", version_policy=VersionPolicy())
    parts = (
        record.sha256,
        described.parameters_bytes,
        described.max_batch_size,
        sorted(described.defaults.items()),
        sorted(relevant.parameters.items()),
        replace(relevant, parameters={}),
        [bytes(group) for group in groups],
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
