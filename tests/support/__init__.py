"""Helpers that several test files import."""
