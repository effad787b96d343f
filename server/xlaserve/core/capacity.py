"""The memory budget: predict, reserve, measure, give back."""

from collections import OrderedDict
from collections.abc import Hashable

from xlaserve.errors import OutOfMemory

_REMEMBERED_SIZES = 10_000
"""Measured sizes that are kept for prediction; the least recently used go first."""


class Capacity:
    """The books of model memory, in bytes. Used from the event loop only; never waits.

    Every load holds a reservation from before it starts until its memory is free again: first
    of the predicted size, then of the measured one. No reservation makes the sum exceed the total;
    what is compiled behind a load is written down as it is.
    """

    def __init__(self, total_bytes: int | None = None) -> None:
        self.total_bytes = total_bytes
        """None while it is not known; then nothing is refused."""
        self._held: dict[object, int] = {}

    @property
    def used_bytes(self) -> int:
        """Return the sum of all reservations."""
        return sum(self._held.values())

    def reserve(self, holder: object, model: str, size_bytes: int) -> None:
        """Set the reservation of a holder, or raise OutOfMemory and leave it as it was."""
        others = self.used_bytes - self._held.get(holder, 0)
        if self.total_bytes is not None and others + size_bytes > self.total_bytes:
            raise OutOfMemory(
                model,
                f"failed to load it: it needs {size_bytes} bytes, {others} of "
                f"{self.total_bytes} are in use",
            )
        self._held[holder] = size_bytes

    def correct(self, holder: object, size_bytes: int) -> None:
        """Write down what a holder really uses; one without a reservation stays without."""
        if holder in self._held:
            self._held[holder] = size_bytes

    def missing_bytes(self, holder: object, size_bytes: int) -> int:
        """Return how many bytes others would have to give back for a reservation; 0 for none."""
        if self.total_bytes is None:
            return 0
        others = self.used_bytes - self._held.get(holder, 0)
        return max(0, others + size_bytes - self.total_bytes)

    def release(self, holder: object) -> None:
        """Give a reservation back; one that is not there is no error."""
        self._held.pop(holder, None)


class Reservation:
    """What one load, and then its instance, holds of the budget."""

    def __init__(self, capacity: Capacity, model: str) -> None:
        self._capacity = capacity
        self.model = model

    def set(self, size_bytes: int) -> None:
        """Hold so many bytes instead of what was held; raises OutOfMemory."""
        self._capacity.reserve(self, self.model, size_bytes)

    def correct(self, size_bytes: int) -> None:
        """Hold so many bytes because that is what is used, whether or not it was to be had."""
        self._capacity.correct(self, size_bytes)

    def missing_bytes(self, size_bytes: int) -> int:
        """Return how many bytes others would have to give back for it to hold so many."""
        return self._capacity.missing_bytes(self, size_bytes)

    def release(self) -> None:
        """Give everything back; once is enough, more is no error."""
        self._capacity.release(self)


class MeasuredSizes:
    """What models really took, remembered by whatever may name them again."""

    def __init__(self, limit: int = _REMEMBERED_SIZES) -> None:
        self._limit = limit
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()

    def remember(self, key: Hashable, size_bytes: int) -> None:
        """Keep the size for later loads of the same thing."""
        self._sizes[key] = size_bytes
        self._sizes.move_to_end(key)
        if len(self._sizes) > self._limit:
            self._sizes.popitem(last=False)

    def recall(self, *keys: Hashable) -> int | None:
        """Return the size of the first key that is known."""
        for key in keys:
            if key in self._sizes:
                self._sizes.move_to_end(key)
                return self._sizes[key]
        return None
