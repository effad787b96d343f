"""What docs/architecture.md shows: read from the code, or checked against it."""
