"""Strict protobuf codec with bounded decoding time."""
