"""A fake clock that tests set by hand."""


class HandClock:
    """Returns the time in seconds that it was last set to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
