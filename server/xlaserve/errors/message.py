"""Messages of protobuf that cannot be read, as facts. See `errors`."""


class TooManyFields(ValueError):
    """A message that would take too long to read."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the message has more than {limit} fields (max_message_fields)")


class MalformedMessage(ValueError):
    """Bytes that are no message of the class that was asked for."""
