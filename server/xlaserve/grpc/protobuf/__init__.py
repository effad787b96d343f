"""Protobuf messages, read strictly and in bounded time, and written."""
