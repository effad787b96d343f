"""Load balancing between the replicas of a model on the host."""


class Replicas:
    """Requests in flight per replica."""

    def __init__(self, count: int) -> None:
        self._in_flight = [0] * count

    def take(self, count: int = 1) -> int:
        """Assign requests to the least busy replica, and return its index."""
        replica = self._in_flight.index(min(self._in_flight))
        self._in_flight[replica] += count
        return replica

    def leave(self, replica: int, count: int = 1) -> None:
        """Release requests of a replica."""
        self._in_flight[replica] -= count
