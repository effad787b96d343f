"""Base class of stations that wrap another station and delegate to it."""

from collections.abc import Iterator, Sequence

from xlaserve.errors.panics import ENDS
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.station import Station


class Around:
    """A wrapper that remains in place when the inner station is replaced."""

    def __init__(self, within: Station) -> None:
        self.within = within

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of queued executions."""
        return self.within.pending_since()

    def renew(self, within: Station) -> None:
        """Replace the inner station; queued calls move to the new one."""
        before, self.within = self.within, within
        for relay in before.retire():
            try:
                within.begin(relay)
            except ENDS:
                raise
            except BaseException as error:
                relay.fail(error)

    def retire(self) -> Sequence[InferCall]:
        """Return nothing: only the inner station is replaced."""
        return ()
