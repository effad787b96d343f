"""The check of a device that nobody had before: every figure of issue reports, in minutes."""
