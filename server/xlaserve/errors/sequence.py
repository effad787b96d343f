"""Errors of sequences of requests, as facts. See errors.py."""

from xlaserve.errors import InvalidRequest, XlaserveError, repeatable


class MissingSequence(InvalidRequest):
    """A request to a model that serves sequences says not which one it is of."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"inference request to model '{model}' must specify a non-zero or non-empty "
            "correlation ID (the parameter 'sequence_id')"
        )


class SequenceNotStarted(InvalidRequest):
    """A request continues a sequence that ended, expired or never started."""

    def __init__(self, model: str, sequence: object, processes: int = 1) -> None:
        """Whether another one of several `processes` may have it."""
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
    """A request of a sequence has several rows: which of them would come first?"""

    def __init__(self, model: str, rows: int) -> None:
        super().__init__(
            f"inference request to model '{model}' must specify batch-size 1 due to requirements "
            f"of sequence batcher, got {rows} rows"
        )


class SequenceInterrupted(XlaserveError):
    """A request of a sequence waited for one that was then not executed."""

    def __init__(self, model: str, sequence: object) -> None:
        super().__init__(
            f"model '{model}': an earlier request of sequence {repeatable(str(sequence))} failed,"
            " expired or was cancelled, so this one was not executed either; send it again"
            " from that request"
        )


class StatesLost(XlaserveError):
    """The states of the sequences of a replica are gone with an execution that failed."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"model '{model}': an execution failed on the device and its sequence states are"
            " lost: restart the sequences"
        )
