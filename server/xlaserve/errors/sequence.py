"""Errors about sequences of requests."""

from xlaserve.errors import InvalidRequest, XlaserveError, repeatable


class MissingSequence(InvalidRequest):
    """A request to a sequence model does not specify its sequence."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"inference request to model '{model}' must specify a non-zero or non-empty "
            "correlation ID (the parameter 'sequence_id')"
        )


class SequenceNotStarted(InvalidRequest):
    """A request continues a sequence that has ended, expired or never started."""

    def __init__(self, model: str, sequence: object, processes: int = 1) -> None:
        """With several `processes`, another one may hold the sequence."""
        text = (
            f"inference request for sequence {repeatable(str(sequence))} to model '{model}' must "
            "specify the START flag on the first request of the sequence"
        )
        if processes > 1:
            text += (
                f"; another of the server's {processes} processes may hold the sequence: send all"
                " its requests on one connection"
            )
        super().__init__(text)


class SequenceRows(InvalidRequest):
    """A sequence request has several rows, whose order would be ambiguous."""

    def __init__(self, model: str, rows: int) -> None:
        super().__init__(
            f"inference request to model '{model}' must specify batch-size 1 due to requirements "
            f"of sequence batcher, got {rows} rows"
        )


class SequenceInterrupted(XlaserveError):
    """A request of a sequence waited for an earlier one that was then not executed."""

    def __init__(self, model: str, sequence: object) -> None:
        super().__init__(
            f"model '{model}': an earlier request of sequence {repeatable(str(sequence))} failed,"
            " expired or was cancelled, so this one was not executed either; send it again"
            " from that request"
        )


class StatesLost(XlaserveError):
    """A failed execution has destroyed the sequence states of a replica."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"model '{model}': an execution failed on the device and its sequence states are"
            " lost: restart the sequences"
        )
