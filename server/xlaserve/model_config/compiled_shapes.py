"""Configured sizes of open dimensions, compiled with the load."""

from collections.abc import Collection, Mapping

import msgspec

COMPILED_SHAPES = "compiled_shapes"
"""The parameter of a configuration that lists the sizes: "128,512", or by the names that the
dimensions have in the artifact, `{"s": [128, 512], "t": [8]}`."""

MAX_ON_DEMAND_SHAPES = "max_on_demand_shapes"
"""Parameter: limit of programs for other shapes."""


def parse(text: str, names: Collection[str]) -> Mapping[str, tuple[int, ...]]:
    """Return the listed sizes by the name of a dimension; a list alone is of the only one.

    Empty for what is no such list. Whether those are the names that the artifact has is not looked
    at.
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
