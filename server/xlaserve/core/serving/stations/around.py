"""The base of stations that wrap another one, and delegate to it."""

from collections.abc import Sequence

from xlaserve.core.serving.infer_call import InferCall
from xlaserve.core.serving.stations.station import Station


class Around:
    """Stays while the station within is replaced."""

    def __init__(self, within: Station) -> None:
        self.within = within

    @property
    def pending(self) -> int:
        """Return how many executions wait to begin."""
        return self.within.pending

    def renew(self, within: Station) -> None:
        """Have another station execute from now on; what waits in the one before moves there."""
        before, self.within = self.within, within
        for relay in before.retire():
            try:
                within.begin(relay)
            except Exception as error:
                relay.fail(error)

    def retire(self) -> Sequence[InferCall]:
        """Return nothing: it is never replaced, what is within is."""
        return ()
