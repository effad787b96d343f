"""Speaks to the world: protobuf, HTTP, JSON; decides nothing."""
