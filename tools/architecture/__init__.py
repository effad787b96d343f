"""The contents of docs/architecture.md: read from the code, or checked against it."""
