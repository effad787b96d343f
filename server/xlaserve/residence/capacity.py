"""The memory budget of each device: reserve, measure, release, and wait for a release."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from xlaserve.errors import OutOfMemory
from xlaserve.serving.access.sight import seen_now, without_names

Sizes: TypeAlias = Mapping[str, int]
"""Bytes per device name, such as `cpu:0` or `cuda:1`."""


class Capacity:
    """The reserved memory of each device, in bytes. Used from the event loop only.

    Every load holds a reservation from before it starts until its memory is free again: first for
    the predicted size, later for the measured one. `reserve` never lets the sum on a device exceed
    its total; `correct` records measured memory even beyond the total, such as programs compiled
    after a load.
    """

    def __init__(self, totals: Sizes | None = None, elsewhere_bytes: int | None = None) -> None:
        self._totals = totals
        self._elsewhere_bytes = elsewhere_bytes
        self.kind = ""
        """JAX's device kind; empty while unknown."""
        self._held: dict[object, Sizes] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        """One future per task waiting in `changed`. Their number is bounded: concurrent loads are
        limited, and each model has one task that finishes it."""

    def limit(self, totals: Sizes, elsewhere_bytes: int | None = None, kind: str = "") -> None:
        """Set the total memory of each device; until this call every reservation is accepted.

        `elsewhere_bytes` is the total of any other device, such as the host on a GPU machine.
        """
        self._totals, self._elsewhere_bytes = totals, elsewhere_bytes
        self.kind = kind

    @property
    def totals(self) -> Sizes:
        """Return the total memory per device; empty until `limit` is called."""
        return self._totals or {}

    @property
    def total_bytes(self) -> int | None:
        """Return the total memory of all devices, or None until `limit` is called."""
        return None if self._totals is None else sum(self._totals.values())

    @property
    def smallest_bytes(self) -> int | None:
        """Return the total memory of the smallest device, or None until `limit` is called."""
        return None if self._totals is None else min(self._totals.values(), default=0)

    @property
    def used_bytes(self) -> int:
        """Return the sum of all reservations on the devices in `totals`."""
        return sum(
            size
            for sizes in self._held.values()
            for device, size in sizes.items()
            if self._totals is None or device in self._totals
        )

    def used_on(self, device: str) -> int:
        """Return the sum of all reservations on one device."""
        return sum(sizes.get(device, 0) for sizes in self._held.values())

    def reserve(self, holder: object, model: str, sizes: Sizes) -> None:
        """Set a holder's reservation. Raises OutOfMemory and then leaves the old one in place."""
        for device in self.missing(holder, sizes):
            free = max(0, self._free(holder, device) or 0)
            message = (
                f"failed to load it: it needs {sizes[device]} bytes on {device}, where "
                f"{free} of {self._total(device)} are free"
            )
            raise OutOfMemory(
                model, without_names(message, seen_now()), needed_bytes=max(sizes.values())
            )
        self._hold(holder, sizes)

    def correct(self, holder: object, sizes: Sizes) -> None:
        """Record a holder's measured use. Does nothing for a holder without a reservation."""
        if holder in self._held:
            self._hold(holder, sizes)

    def hand_over(self, holder: object, other: object) -> None:
        """Transfer a holder's reservation to another."""
        if holder in self._held:
            self._held[other] = self._held.pop(holder)

    def held(self, holder: object) -> Sizes:
        """Return the bytes reserved for a holder, by device."""
        return self._held.get(holder, {})

    def missing(self, holder: object, sizes: Sizes) -> Sizes:
        """Return how many bytes are missing on each device for a reservation of these sizes."""
        missing = {}
        for device, size in sizes.items():
            free = self._free(holder, device)
            if free is not None and size > max(0, free):
                missing[device] = size - free
        return missing

    def release(self, holder: object) -> None:
        """Release a holder's reservation, if it has one, and wake the waiting tasks."""
        if self._held.pop(holder, None) is not None:
            self._tell()

    def exceeds(self, sizes: Sizes) -> bool:
        """Tell whether some device is too small for these sizes even when it is empty."""
        totals = ((self._total(device), size) for device, size in sizes.items())
        return any(total is not None and size > total for total, size in totals)

    async def changed(self) -> None:
        """Wait until a holder changes or releases its reservation, which may never happen."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)

    def _hold(self, holder: object, sizes: Sizes) -> None:
        known = holder in self._held
        self._held[holder] = sizes
        if known:
            self._tell()

    def _tell(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    def _total(self, device: str) -> int | None:
        return None if self._totals is None else self._totals.get(device, self._elsewhere_bytes)

    def _free(self, holder: object, device: str) -> int | None:
        """Return the bytes that a holder may reserve; negative if others exceed the total."""
        total = self._total(device)
        if total is None:
            return None
        return total - self.used_on(device) + self.held(holder).get(device, 0)


def greatest(*found: Sizes) -> Sizes:
    """Return the largest size on each device."""
    devices = dict.fromkeys(device for sizes in found for device in sizes)
    return {device: max(sizes.get(device, 0) for sizes in found) for device in devices}


def fullest(sizes: Iterable[Sizes]) -> int:
    """Add up the sizes per device, and return the sum of the fullest device."""
    first, *others = sizes
    if not others:
        return max(first.values(), default=0)
    held: Counter[str] = Counter(first)
    for of_devices in others:
        held.update(of_devices)
    return max(held.values(), default=0)


class Reservation:
    """The reserved memory of one load, and later of the instance that it made."""

    def __init__(self, capacity: Capacity, model: str) -> None:
        self._capacity = capacity
        self.model = model
        self.needed: Sizes = {}
        """The peak of the reservation, per device. A load may need more than its model holds
        afterwards."""

    @property
    def sizes(self) -> Sizes:
        """Return the reserved bytes per device."""
        return self._capacity.held(self)

    def set(self, sizes: Sizes) -> None:
        """Change the reservation, or raise OutOfMemory."""
        self._capacity.reserve(self, self.model, sizes)
        self.needed = greatest(self.needed, sizes)

    def correct(self, sizes: Sizes) -> None:
        """Record the measured use, even beyond the device's total."""
        self._capacity.correct(self, sizes)

    def missing(self, sizes: Sizes) -> Sizes:
        """Return how many bytes are missing on each device to grow to these sizes."""
        return self._capacity.missing(self, sizes)

    def exceeds(self, sizes: Sizes) -> bool:
        """Tell whether some device is too small for these sizes even when it is empty."""
        return self._capacity.exceeds(sizes)

    def handed_over(self) -> "Reservation":
        """Move the reserved bytes to a new reservation, which is returned."""
        other = Reservation(self._capacity, self.model)
        self._capacity.hand_over(self, other)
        return other

    def release(self) -> None:
        """Release everything. Further calls do nothing."""
        self._capacity.release(self)
