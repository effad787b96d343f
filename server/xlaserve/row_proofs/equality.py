"""Value numbering: finds values that are computed in the same way.

Equal labels mean equal values. A label consists of the operation's name, attributes, result types,
regions, and the labels of its operands. A value from outside a region is labeled by its identity.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeAlias

from xlaserve.row_proofs.program import Operation, Region

Labels: TypeAlias = dict[int, Hashable]


def labelled(
    region: Region, arguments: Mapping[int, Hashable], keys: dict[Hashable, int]
) -> Labels:
    """Label all values of a region; `arguments` has the labels of its arguments.

    Labels of two regions are comparable if both were made with the same `keys`.
    """
    labels: Labels = dict(arguments)
    _label(region, labels, keys, 0)
    return labels


def _label(region: Region, labels: Labels, keys: dict[Hashable, int], depth: int) -> None:
    for operation in region.operations:
        number = keys.setdefault(_key(operation, labels, keys, depth), len(keys))
        for place, result in enumerate(operation.results):
            labels[result] = ("computed", number, place)


def _key(operation: Operation, labels: Labels, keys: dict[Hashable, int], depth: int) -> Hashable:
    return (
        operation.name,
        tuple(_of(number, labels) for number in operation.operands),
        tuple(sorted(operation.attributes.items(), key=_name)),
        operation.types,
        tuple(_inner(region, labels, keys, depth + 1) for region in operation.regions),
    )


def _name(item: tuple[str, object]) -> str:
    return item[0]


def _of(number: int, labels: Labels) -> Hashable:
    return labels.get(number, ("outside", number))


def _inner(region: Region, labels: Labels, keys: dict[Hashable, int], depth: int) -> Hashable:
    """Return a key for a nested region; equal keys mean equal results."""
    own: Labels = dict(labels)
    own.update(
        (number, ("argument", depth, place)) for place, number in enumerate(region.arguments)
    )
    _label(region, own, keys, depth)
    return len(region.arguments), tuple(_of(number, own) for number in region.returned)
