"""Counts of one program store, for metrics. Needs no JAX."""

import threading


class ProgramCounts:
    """The lookups and writes of the compilation cache, or of the store. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.hits = 0
        """Lookups that found a program, which was used."""
        self.misses = 0
        """Lookups that found none."""
        self.unusable = 0
        """Lookups that found what cannot be used: damaged, too large, or of another environment."""
        self.unanswered = 0
        """Lookups that a store did not answer in time, or at all; it is not asked for a while."""
        self.seconds = 0.0
        """Total time of lookups, including reads of hits."""
        self.read_bytes = 0
        self.written = 0
        self.written_bytes = 0
        self.failures = 0
        """Programs that could not be written."""

    def add(self, **counts: float) -> None:
        """Add to counts, by name."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)
