"""Python models with `execution: process`: each replica is a separate process."""
