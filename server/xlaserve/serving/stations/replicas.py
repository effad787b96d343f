"""Chooses the replica of a model on the host with the least to do."""


class Replicas:
    """The number of requests of each replica that are in flight in threads."""

    def __init__(self, count: int) -> None:
        self._in_flight = [0] * count

    def take(self, count: int = 1) -> int:
        """Give so many more to the replica with the fewest, and return its index."""
        replica = self._in_flight.index(min(self._in_flight))
        self._in_flight[replica] += count
        return replica

    def leave(self, replica: int, count: int = 1) -> None:
        """Count so many less."""
        self._in_flight[replica] -= count
