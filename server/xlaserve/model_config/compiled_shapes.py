"""Parses the configured sizes of dynamic dimensions."""

from collections.abc import Collection, Mapping

import msgspec

COMPILED_SHAPES = "compiled_shapes"
"""Name of the parameter that lists the sizes to compile with the load: "128,512", or by the
artifact's dimension names, `{"s": [128, 512], "t": [8]}`."""

MAX_ON_DEMAND_SHAPES = "max_on_demand_shapes"
"""Name of the parameter that limits how many other shapes are compiled on demand."""


def parse(text: str, names: Collection[str]) -> Mapping[str, tuple[int, ...]]:
    """Parse the sizes by dimension name; a list without names is for the only dimension.

    Returns an empty mapping for malformed text. The names are not compared with the artifact's.
    """
    short = len(names) == 1 and not text.lstrip().startswith("{")
    try:
        written = f"{{{msgspec.json.encode(*names).decode()}:[{text}]}}" if short else text
        sizes = msgspec.json.decode(written, type=dict[str, tuple[int, ...]])
    except msgspec.MsgspecError:
        return {}
    is_sized = all(
        found and min(found) > 0 and len(set(found)) == len(found) for found in sizes.values()
    )
    return sizes if is_sized else {}
