"""A clock that is moved by hand."""


class HandClock:
    """Tells the seconds that it was last set to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
