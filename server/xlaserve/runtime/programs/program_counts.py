"""Counters of a program cache or store, for metrics. Does not import JAX."""

import threading


class ProgramCounts:
    """Look-ups and writes of the compilation cache or of the store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.hits = 0
        """Look-ups that found a usable program."""
        self.misses = 0
        """Look-ups that found no program."""
        self.unusable = 0
        """Look-ups that found an unusable program: damaged, too large, or for another environment.
        """
        self.unanswered = 0
        """Look-ups that the store failed to answer in time; the store is then skipped for a while.
        """
        self.seconds = 0.0
        """Total time of look-ups in seconds, including reading the programs."""
        self.read_bytes = 0
        self.written = 0
        self.written_bytes = 0
        self.failures = 0
        """Programs that could not be written."""

    def add(self, **counts: float) -> None:
        """Add to counters, by name."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)
