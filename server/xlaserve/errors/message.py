"""Errors in decoding protobuf messages."""


class TooManyFields(ValueError):
    """A message has so many fields that decoding it would take too long."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the message has more than {limit} fields (max_message_fields)")


class MalformedMessage(ValueError):
    """The bytes are not a valid message of the expected type."""
